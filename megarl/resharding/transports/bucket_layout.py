"""Lays out the moves of a bucket while it travels: in a buffer, or in the parameters themselves."""

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
    """A move at one of its holders.

    start   its first byte in the buffer, or None where its elements lie in one stretch of the parameter, from or to
            which they travel without a copy
    """

    move: Move
    place: Place
    start: int | None

    @property
    def num_bytes(self) -> int:
        return messages.move_bytes(self.move)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what travels."""
        return getattr(torch, self.move.destination_dtype)

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the elements of the parameter."""
        return view(parameters[self.place.parameter], self.place.rectangle)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        elements = buffer[self.start : self.start + self.num_bytes].view(self.dtype)
        return elements.view(shape_of(self.place.rectangle))


@dataclass(frozen=True)
class BucketLayout:
    """A bucket at one of its holders.

    alone      the moves that are messages of their own
    together   the moves that are the last message
    num_bytes  bytes of the buffer
    """

    alone: tuple[Part, ...]
    together: tuple[Part, ...]
    num_bytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.alone, *self.together)

    def messages(self, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the tensors that are sent, or received into."""
        for part in self.alone:
            yield part.of(parameters) if part.start is None else part.in_buffer(buffer)
        if self.together:
            yield buffer[self.together[0].start : self.num_bytes]


def lay_out(moves: Iterable[tuple[Move, Place]], parameters: Mapping[str, torch.Tensor]) -> BucketLayout:
    """Returns the layout of a bucket, with the same messages at all holders.

    moves        each with the place of its elements at this holder
    parameters   this holder's; a move of another one goes by way of the buffer
    """
    alone, together = [], []
    offset, least = 0, messages.ALONE_BYTES_OF_NCCL if device.uses_nccl() else messages.ALONE_BYTES
    for move, place in sorted(moves, key=lambda item: (not messages.is_alone(item[0], least), *_size_key(item))):
        in_place = messages.is_alone(move, least) and _lies_in_one_stretch(move, place, parameters)
        (alone if messages.is_alone(move, least) else together).append(Part(move, place, None if in_place else offset))
        offset += 0 if in_place else messages.move_bytes(move)
    return BucketLayout(tuple(alone), tuple(together), offset)


def _lies_in_one_stretch(move: Move, place: Place, parameters: Mapping[str, torch.Tensor]) -> bool:
    if place.parameter not in parameters:
        return False
    elements = view(parameters[place.parameter], place.rectangle)
    return elements.is_contiguous() and elements.dtype == getattr(torch, move.destination_dtype)


def _size_key(item: tuple[Move, Place]) -> tuple[int]:
    """Returns the key by which larger dtypes come first, so that all are aligned."""
    return (-ITEM_BYTES[item[0].destination_dtype],)
