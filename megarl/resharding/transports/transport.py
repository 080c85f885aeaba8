"""The interface that every transport offers to the execution of a plan."""

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
    """The bytes allocated for what is on its way, at their peak in the last delivery."""

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Returns the dtype of a source's parameter. Raises UserError for one that the source does not have."""

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Yields the copies, whole or in parts and in any order, each with its elements, or None where they are in
        their place already. They are valid until the next is asked for, and by then the destination has written
        them."""


class Channel(Protocol):
    """A transport before it is opened: can be pickled and sent to those that take part in it."""

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Transport:
        """Opens the transport in the process that is `member`, a holder, and has these parameters.

        plan      the member's part of the plan
        in_place  whether the parameters are those that the plan writes. If not, they only tell the device
        """


class Readable(ABC):
    """A transport by which the destination reads its sources where they lie."""

    staging_bytes = 0

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        for copy in copies:
            yield copy, self.read(copy.source, *copy.move.source)

    @abstractmethod
    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """See Transport."""

    @abstractmethod
    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        """Returns the elements of a rectangle of a source's parameter, as a view of the source where the medium allows
        it."""


def view(tensor: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """Returns a rectangle of a tensor, which shares its storage."""
    return tensor[tuple(slice(start, stop) for start, stop in rectangle)]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name as plans write it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
