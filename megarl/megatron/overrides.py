"""The key megatron_overrides: fields of Megatron's own dataclasses, checked against their names and types."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.core.errors import UserError

T = TypeVar("T")


def checked(key: str, extra: Mapping[str, Any], target: type, ours: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the fields for the dataclass `target`, with dtypes and enum members in place of their names.

    key    the key under which they are given, such as actor.megatron_overrides.model
    ours   fields that follow from keys of our own -> that key; None: no key, the trainer relies on its value

    Raises UserError for a field that is unknown, one of ours, or of another type.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(target)}
    hints = get_type_hints(target)
    values = {}
    for name, value in extra.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            raise UserError(f"{key}.{name}={value}: Megatron's {target.__name__} has no such field; {remedy}")
        if name in ours:
            home = ours[name]
            why = (
                f"this follows from {home}; set it there"
                if home
                else "the trainer relies on its own value; leave it out"
            )
            raise UserError(f"{key}.{name}={value}: {why}")
        values[name] = _converted(f"{key}.{name}", value, hints[name] | None if defaults[name] is None else hints[name])
    return values


def build(settings: str, target: type[T], fields: Mapping[str, Any]) -> T:
    """Make the dataclass. Raises UserError that names the settings for fields that it refuses."""
    try:
        return target(**fields)
    except (AssertionError, ValueError) as error:
        raise UserError(f"{settings}: Megatron's {target.__name__} refuses these settings: {error}") from error


def described(section: str, key: str, extra: Mapping[str, Any]) -> str:
    """Return the settings of a section for a message: the overrides under the key, or the section if there are
    none."""
    return ", ".join(f"{key}.{name}={value}" for name, value in extra.items()) or section


def _converted(key: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    named = value
    if isinstance(value, str) and torch.dtype in kinds:
        named = getattr(torch, value, value)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
            named = kind[value]
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(named, strict=True)
    except ValidationError:
        raise UserError(f"{key}={value!r}: expected {_readable(hint)}, found {type(value).__name__}") from None


def _readable(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("torch.dtype", "dtype")
