"""What every transport offers to the execution of a plan."""

from __future__ import annotations

from typing import Protocol

import torch

from megarl.resharding.piece import Rectangle


class Transport(Protocol):
    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Of a source's parameter. Raises ValueError for one that the source does not have."""

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        """The elements of a rectangle of a source's parameter, as a view of the source where the medium allows it."""


def view(tensor: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """A rectangle of a tensor, sharing its storage."""
    return tensor[tuple(slice(start, stop) for start, stop in rectangle)]


def dtype_name(dtype: torch.dtype) -> str:
    """As plans write it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
