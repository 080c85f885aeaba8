"""Saves groups of samples to a file that contains no code, unlike a pickle.

The file is in the safetensors format. Its tensors are the samples' arrays and two JSON texts: the prompts, and the
groups, which refer to prompts by index. Values that JSON cannot represent are encoded as objects with one of the
keys below. Floats are restored exactly. Environment samples include their encoded images, each stored once. Images of
the data set are read from it again.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from megarl.core.completion import CandidateIds, DraftCounts, VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.errors import UserError
from megarl.core.latents import AnySample, Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample

SavedGroup = tuple[int, int, list[AnySample]]
"""(prompt's row in the data, weight version at the start of its samples, samples)."""

_KINDS = (
    CandidateIds,
    Conditioning,
    DraftCounts,
    Episode,
    LatentSample,
    Prompt,
    PromptImage,
    RolloutInfo,
    Sample,
    VersionRun,
)
CLASSES = {kind.__name__: kind for kind in _KINDS}
CLASS, ARRAY, BYTES, PROMPT, TUPLE, ITEMS = (
    *("__class__", "__array__", "__bytes__"),
    *("__prompt__", "__tuple__", "__items__"),
)
"""Keys that mark a JSON object as an instance, an array, bytes, a prompt, a tuple, or a dictionary with arbitrary
keys."""

DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RecursionError, OverflowError)
"""Exceptions that reading a malformed file may raise."""


def save_samples(groups: Sequence[SavedGroup], file: Path) -> None:
    """Write the groups to a file."""
    # Do not use safetensors' save_file, whose files only the owner may read.
    file.write_bytes(sample_bytes(groups))


def sample_bytes(groups: Sequence[SavedGroup]) -> bytes:
    """Return the contents of a file with these groups. Adjacent samples with equal prompts share the prompt."""
    from safetensors.numpy import save

    encoder = _Encoder()
    texts = {"groups": _text(encoder.encode([list(group) for group in groups])), "prompts": _text(encoder.prompts)}
    return save(encoder.arrays | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()})


def load_samples(file: Path) -> list[SavedGroup]:
    """Read groups written by `save_samples`. Raise a UserError that names the file if it contains anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        decoder = _Decoder(load_file(file))
        decoder.prompts = decoder.decode("prompts")
        groups = [(row, version, samples) for row, version, samples in decoder.decode("groups")]
        if not all(_matches(group, SavedGroup) for group in groups):
            raise ValueError("a group is malformed")
        return groups
    except (SafetensorError, OSError, *DAMAGE) as error:
        raise UserError(
            f"{file}: not a sample file written by megarl ({error}). Fix: resume from another checkpoint"
        ) from None


class _Encoder:
    """Converts values to JSON values and collects their arrays and prompts."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.prompts: list[Any] = []
        self._last: Prompt | None = None
        self._bytes: dict[bytes, str] = {}
        """Encoded image -> name of its array."""

    def encode(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {ARRAY: self._add(value)}
        if isinstance(value, bytes):
            if value not in self._bytes:
                self._bytes[value] = self._add(np.frombuffer(value, np.uint8))
            return {BYTES: self._bytes[value]}
        if isinstance(value, Prompt):
            if self._last is None or value != self._last:
                self._last = value
                self.prompts.append(self._instance(value))
            return {PROMPT: len(self.prompts) - 1}
        if isinstance(value, PromptImage):
            return self._instance(value if isinstance(value.file, bytes) else replace(value, file=None))
        if type(value) in CLASSES.values():
            return self._instance(value)
        if value is None or isinstance(value, str | int | float | np.generic) or _is_plain(value):
            return value
        if isinstance(value, list):
            return [self.encode(entry) for entry in value]
        if isinstance(value, tuple):
            return {TUPLE: [self.encode(entry) for entry in value]}
        return {ITEMS: [[self.encode(key), self.encode(entry)] for key, entry in value.items()]}

    def _add(self, array: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = np.ascontiguousarray(array)
        return name

    def _instance(self, value: Any) -> dict[str, Any]:
        return {CLASS: type(value).__name__, **{f.name: self.encode(getattr(value, f.name)) for f in fields(value)}}


def _is_plain(value: Any) -> bool:
    """Return whether the value survives a JSON round trip. Such values may be nested more deeply than `encode`
    can recurse."""
    try:
        text = _text(value)
    except (TypeError, ValueError):
        return False
    return b'"__' not in text and json.loads(text) == value


def _text(value: Any) -> bytes:
    return json.dumps(value, default=np.generic.item).encode()


class _Decoder:
    """Restores values from JSON. It creates only instances of `CLASSES` whose fields have the declared types."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self._bytes: dict[str, bytes] = {}
        self.prompts: list[Any] = []

    def decode(self, name: str) -> Any:
        return json.loads(self._arrays[name].tobytes(), object_hook=self._object)

    def _object(self, value: dict[str, Any]) -> Any:
        if CLASS in value:
            return self._instance(CLASSES[value.pop(CLASS)], value)
        if ARRAY in value:
            return self._arrays[value[ARRAY]]
        if BYTES in value:
            name = value[BYTES]
            if name not in self._bytes:
                self._bytes[name] = self._arrays[name].tobytes()
            return self._bytes[name]
        if PROMPT in value:
            return self.prompts[value[PROMPT]]
        if TUPLE in value:
            return tuple(value[TUPLE])
        return dict(value[ITEMS]) if ITEMS in value else value

    def _instance(self, kind: type, values: dict[str, Any]) -> Any:
        hints = _hints(kind)
        for name, value in values.items():  # files of older versions lack newer fields, which have defaults
            if not _matches(value, hints[name]):
                raise ValueError(f"{kind.__name__}.{name} has the type {type(value).__name__}")
        return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _matches(value: Any, hint: Any) -> bool:
    """Return whether the value has this type. The values of mappings may have any type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_matches(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is Conditioning:
        return isinstance(value, Conditioning)
    if isinstance(hint, TypeVar):  # a field of Conditioning, which may also contain tensors
        return isinstance(value, np.ndarray)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, get_args(arguments[1])[0])
    if origin is list:
        return isinstance(value, list) and all(_matches(entry, arguments[0]) for entry in value)
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, tuple) and all(_matches(entry, arguments[0]) for entry in value)
    if origin is tuple:
        return len(value) == len(arguments) and all(map(_matches, value, arguments))
    if origin is Mapping:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
