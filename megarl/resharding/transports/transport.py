"""The interface of transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from megarl.resharding.piece import Rectangle
from megarl.resharding.planning.plan import Copy, Plan

Delivered = tuple[Copy, torch.Tensor | None]
Delivery = Iterator[Delivered]


class Transport(Protocol):
    staging_bytes: int
    """Peak bytes of transfer buffers in the last delivery."""

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Return the dtype of a source's parameter. Raises UserError if the source has no such parameter."""

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Yield the copies, whole or in parts and in any order, each with its elements.

        The elements are None if the transport has already written them into the destination parameter. They are valid
        until the next copy is requested; by then the caller must have written them.
        """


class Channel(Protocol):
    """A picklable description of a transport, which each participating process opens."""

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Transport:
        """Open the transport in the process of one holder.

        Args:
            member: name of the holder.
            parameters: its parameters.
            plan: its part of the plan.
            in_place: whether `parameters` are the parameters that the plan writes. Otherwise they only determine the
                device.
        """


class Readable(ABC):
    """Base class of transports through which a destination reads its sources directly."""

    staging_bytes = 0

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        for copy in copies:
            yield copy, self.read(copy.source, *copy.move.source)

    @abstractmethod
    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """See Transport."""

    @abstractmethod
    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        """Return a rectangle of a source's parameter, as a view if the medium allows it."""


def view(tensor: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """Return a view of a rectangle of the tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in rectangle)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of the dtype in plans, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
