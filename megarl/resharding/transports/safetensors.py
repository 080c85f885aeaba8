"""Read slices from the safetensors files in a Hugging Face folder, and write such files one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.core.errors import UserError
from megarl.resharding.piece import Holder, Rectangle, num_bytes
from megarl.resharding.transports.checksum import raw_bytes
from megarl.resharding.transports.transport import Readable, dtype_name

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder(Readable):
    """A folder with model.safetensors or with shards and an index, as a context manager that closes the files.

    The folder is a single source; the `source` argument of reads is ignored.
    """

    def __init__(self, folder: Path):
        """Raise a UserError if the folder has no safetensors weights, or if shards are missing."""
        self._folder = folder
        self._files = _files_by_tensor(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def with_file_dtypes(self, holder: Holder) -> Holder:
        """Return the holder with the files' dtypes. Raise a UserError if a tensor is missing or has a wrong shape."""
        for name, shape in holder.shapes.items():
            stored = tuple(self._slice(name).get_shape())
            if stored != shape:
                raise UserError(
                    f"{self._folder}: {name} has shape {stored}, but config.json requires {shape}. Fix: use the "
                    "config.json of the model that these weights belong to"
                )
        dtypes = {name: dtype_name(self.dtype(holder.name, name)) for name in holder.shapes}
        return replace(holder, shard=replace(holder.shard, dtypes=dtypes))

    def unexpected(self, holder: Holder) -> list[str]:
        """Return the names of tensors that are in the files but not in the holder."""
        return sorted(self._files.keys() - holder.shapes.keys())

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        name = self._slice(parameter).get_dtype()
        if name not in DTYPES:
            raise UserError(
                f"{self._folder}: {parameter} has the unsupported dtype {name}. Supported dtypes: {', '.join(DTYPES)}. "
                "Fix: convert the weights to one of them"
            )
        return DTYPES[name]

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        return self._slice(parameter)[tuple(slice(start, stop) for start, stop in rectangle)]

    def _slice(self, parameter: str) -> Any:
        if parameter not in self._files:
            raise UserError(
                f"{self._folder}: the checkpoint has no tensor {parameter}. Fix: use a complete checkpoint of the model"
            )
        path = self._files[parameter]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path].get_slice(parameter)


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {tensor: folder / name for tensor, name in names.items()}
    elif single.is_file():
        with safe_open(single, framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), single)
    else:
        raise UserError(f"{folder}: contains neither {SINGLE} nor {INDEX}. Fix: save the weights as safetensors")
    for path in set(files.values()):
        if not path.is_file():
            raise UserError(f"{folder}: {INDEX} lists {path.name}, but the file does not exist. Fix: download the file")
    return files


def write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Write a safetensors file one tensor at a time. The library's own writer needs all tensors at once. `tensor`
    returns the tensor with a given name and is called in the order of `shapes`."""
    names = {dtype_name(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + num_bytes(shape, dtypes[name])
        header[name] = {"dtype": names[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(raw_bytes(tensor(name)))
