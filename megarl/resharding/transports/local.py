"""Read sources whose tensors are in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.resharding.piece import Rectangle
from megarl.resharding.transports.transport import Readable, view


class LocalMemory(Readable):
    """Sources whose tensors are in this process's memory."""

    def __init__(self, sources: Mapping[str, Mapping[str, torch.Tensor]]):
        """`sources` maps holder names to parameters."""
        self._sources = sources

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return self._tensor(source, parameter).dtype

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        return view(self._tensor(source, parameter), rectangle)

    def _tensor(self, source: str, parameter: str) -> torch.Tensor:
        try:
            return self._sources[source][parameter]
        except KeyError:
            raise ValueError(f"{source} has no parameter {parameter}") from None
