"""Define the interface that transports implement."""

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
    """Delivers elements of source parameters to one holder."""

    @property
    def staging_bytes(self) -> int:
        """Peak size of the transfer buffers during the last delivery, in bytes."""
        ...

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Return the dtype of a source's parameter. Raise a ValueError if the source has no such parameter."""
        ...

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Yield each copy with its elements. Copies may be split into parts, and arrive in any order.

        The elements are None if the transport has already written them into the destination parameter. Otherwise, the
        caller must write them before it requests the next copy, because they are valid only until then.
        """
        ...


class Channel(Protocol):
    """A picklable description of a transport, which each participating process opens."""

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Transport:
        """Open the transport in the process of one holder.

        Args:
            member: name of the holder.
            parameters: the holder's parameters.
            plan: the holder's part of the plan.
            in_place: whether the plan writes into `parameters`. Otherwise, they only determine the device.
        """
        ...


class Readable(ABC):
    """Base class for transports through which a destination reads its sources directly."""

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
    """Return the name by which plans identify the dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
