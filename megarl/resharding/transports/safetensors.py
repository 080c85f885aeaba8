"""Read slices from the safetensors files in a Hugging Face folder, and write such files one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megarl.models.weight_files import (
    DEQUANTIZED,
    DTYPES,
    MXFP4_BLOCK,
    Place,
    Stack,
    open_file,
    places,
    read_headers,
    require_dtype,
    require_names,
    require_tensors,
)
from megarl.resharding.piece import Holder, Rectangle, num_bytes
from megarl.resharding.transports.checksum import raw_bytes
from megarl.resharding.transports.mxfp4 import dequantized
from megarl.resharding.transports.transport import Readable, dtype_name

TORCH_DTYPES = dict(zip(DTYPES, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))


class SafetensorsFolder(Readable):
    """A folder with model.safetensors or with shards and an index, as a context manager that closes the files.

    The folder is a single source; the `source` argument of reads is ignored.
    """

    def __init__(self, folder: Path):
        """Raise a UserError if the folder has no safetensors weights, or if shards are missing."""
        self._folder = folder
        self._places = places(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def with_file_dtypes(self, holder: Holder) -> Holder:
        """Return the holder with the files' dtypes. Raise a UserError if a tensor is missing or has a wrong shape."""
        require_tensors(self._folder, read_headers(self._folder), holder.shapes)
        dtypes = {name: dtype_name(self.dtype(holder.name, name)) for name in holder.shapes}
        return replace(holder, shard=replace(holder.shard, dtypes=dtypes))

    def unexpected(self, holder: Holder) -> list[str]:
        """Return the names of tensors that are in the files but not in the holder."""
        return sorted(self._places.keys() - holder.shapes.keys())

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        stored, place = self._stored(parameter), self._places[parameter]
        name = stored.get_dtype() if place.scales is None else DEQUANTIZED
        require_dtype(self._folder, parameter, name)
        return TORCH_DTYPES[name]

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        stored, place = self._stored(parameter), self._places[parameter]
        if place.rows is None:
            return stored[tuple(slice(start, stop) for start, stop in rectangle)]
        (first, last), *columns = rectangle
        sides = (first + place.rows[0], last + place.rows[0]), *columns
        if place.scales is not None:
            return self._dequantized(place, *sides)
        if place.is_transposed:
            return stored[(place.expert, *(slice(start, stop) for start, stop in reversed(sides)))].t()
        return stored[(place.expert, *(slice(start, stop) for start, stop in sides))]

    def _dequantized(self, place: Place, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        assert place.scales is not None
        first, last = columns[0] // MXFP4_BLOCK, -(-columns[1] // MXFP4_BLOCK)
        parts = place.expert, slice(*rows), slice(first, last)
        blocks, scales = self._tensor(place.path, place.stored)[parts], self._tensor(*place.scales)[parts]
        return dequantized(blocks, scales)[:, columns[0] - first * MXFP4_BLOCK : columns[1] - first * MXFP4_BLOCK]

    def _stored(self, parameter: str) -> Any:
        """Return the stored tensor that contains the parameter."""
        require_names(self._folder, self._places, [parameter])
        path, name, *_ = self._places[parameter]
        return self._tensor(path, name)

    def _tensor(self, path: Path, name: str) -> Any:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(open_file(path, "pt"))
        return self._open[path].get_slice(name)


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    tensor: Callable[[str], torch.Tensor],
    stacks: Mapping[str, Stack] = MappingProxyType({}),
    stored_name: Callable[[str], str] = str,
) -> None:
    """Write a safetensors file one tensor at a time. The library's own writer needs all tensors at once.

    Args:
        shapes, dtypes: shapes and dtypes of the tensors in the file, including stacks.
        tensor: function that returns the tensor with a given name. It is called in the order of `shapes`, for each
            member of a stack.
        stacks: the stacks among the tensors in the file, by name.
        stored_name: function that returns the name in the file.
    """
    names = {dtype_name(dtype): name for name, dtype in TORCH_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + num_bytes(shape, dtypes[name])
        header[stored_name(name)] = {"dtype": names[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            stack = stacks.get(name)
            is_transposed = stack is not None and stack.is_transposed
            for members in ((name,),) if stack is None else stack.experts:
                # Copy tensors before concatenating them, because `tensor` may reuse memory.
                is_whole = len(members) == 1
                values = tensor(members[0]) if is_whole else torch.cat([tensor(part).clone() for part in members])
                file.write(raw_bytes(values.t().contiguous() if is_transposed else values))
