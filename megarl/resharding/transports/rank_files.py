"""Read weights that ranks, possibly on other nodes, have written to a shared file system."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from megarl.models.weight_files import SINGLE
from megarl.resharding.piece import Rectangle
from megarl.resharding.transports.safetensors import SafetensorsFolder, write_file
from megarl.resharding.transports.transport import Readable, dtype_name


class RankFiles(Readable):
    """Sources whose parameters are in files, in one folder per source.

    Files are opened lazily, because the object is pickled before its first read.
    """

    def __init__(self, folders: Mapping[str, Path]):
        """`folders` maps source names to folders."""
        self._folders = folders
        self._opened: dict[str, SafetensorsFolder] = {}

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return self._source(source).dtype(source, parameter)

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        return self._source(source).read(source, parameter, rectangle)

    def _source(self, name: str) -> SafetensorsFolder:
        if name not in self._opened:
            self._opened[name] = SafetensorsFolder(self._folders[name])
        return self._opened[name]


def write_parameters(parameters: Mapping[str, torch.Tensor], names: Collection[str], folder: Path) -> None:
    """Write the named parameters into a new folder that RankFiles can read."""
    folder.mkdir()
    shapes = {name: tuple(parameters[name].shape) for name in names}
    dtypes = {name: dtype_name(parameters[name].dtype) for name in names}
    write_file(folder / SINGLE, shapes, dtypes, lambda name: parameters[name].detach().cpu().contiguous())
