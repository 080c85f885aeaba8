"""Lay out a bucket's moves for sending or receiving, either in a buffer or directly in the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megarl.core import device
from megarl.resharding.piece import ITEM_BYTES, Place, shape_of
from megarl.resharding.planning import messages
from megarl.resharding.planning.plan import Move
from megarl.resharding.transports.transport import view


@dataclass(frozen=True, slots=True)
class Part:
    """One end of a move. `start` is the byte offset in the buffer; None if the elements are contiguous in the
    parameter, so they are sent from or received into it directly."""

    move: Move
    place: Place
    start: int | None

    @property
    def num_bytes(self) -> int:
        return messages.move_bytes(self.move)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which elements are sent."""
        return getattr(torch, self.move.destination_dtype)

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a view of the elements in the parameter."""
        return view(parameters[self.place.parameter], self.place.rectangle)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """Return a view of the elements in the buffer, or None if they are in the parameter."""
        if self.start is None:
            return None
        elements = buffer[self.start : self.start + self.num_bytes].view(self.dtype)
        return elements.view(shape_of(self.place.rectangle))


@dataclass(frozen=True)
class BucketLayout:
    """The layout of a bucket at one holder. Unpacked moves are sent as individual messages, and packed moves share the
    last message. `num_bytes` is the size of the buffer in bytes."""

    unpacked: tuple[Part, ...]
    packed: tuple[Part, ...]
    num_bytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.unpacked, *self.packed)

    def messages(self, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensor to send or to receive into, for each message."""
        for part in self.unpacked:
            elements = part.in_buffer(buffer)
            yield part.of(parameters) if elements is None else elements
        if self.packed:
            yield buffer[self.packed[0].start : self.num_bytes]


def lay_out(moves: Iterable[tuple[Move, Place]], parameters: Mapping[str, torch.Tensor]) -> BucketLayout:
    """Lay out a bucket. The messages are the same at all holders. `moves` holds the bucket's moves, each with the place
    of its elements at this holder. Moves for parameters that are missing in `parameters` use the buffer."""
    unpacked, packed = [], []
    offset, min_bytes = 0, messages.UNPACKED_BYTES_NCCL if device.uses_nccl() else messages.UNPACKED_BYTES

    def order(item: tuple[Move, Place]) -> tuple[bool, int]:
        """Sort unpacked moves first, then larger dtypes first, so that all moves are aligned."""
        return not messages.is_unpacked(item[0], min_bytes), -ITEM_BYTES[item[0].destination_dtype]

    for move, place in sorted(moves, key=order):
        is_unpacked = messages.is_unpacked(move, min_bytes)
        in_place = is_unpacked and _is_contiguous(move, place, parameters)
        (unpacked if is_unpacked else packed).append(Part(move, place, None if in_place else offset))
        offset += 0 if in_place else messages.move_bytes(move)
    return BucketLayout(tuple(unpacked), tuple(packed), offset)


def _is_contiguous(move: Move, place: Place, parameters: Mapping[str, torch.Tensor]) -> bool:
    if place.parameter not in parameters:
        return False
    elements = view(parameters[place.parameter], place.rectangle)
    return elements.is_contiguous() and elements.dtype == getattr(torch, move.destination_dtype)
