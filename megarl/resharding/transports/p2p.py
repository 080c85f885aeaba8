"""Weights sent from process to process, on one machine or between several: over gloo on CPU, over NCCL on GPU.

The members have a process group of their own, so that neither the trainer's nor the engine's is disturbed. The buckets
of the plan are the messages, and every member has two buffers for them: one is filled or emptied while the other is on
its way. They travel in the plan's order; one that is to leave again when its buffer has been used for others is packed
anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megarl import device
from megarl.resharding.piece import shape_of
from megarl.resharding.plan import Copy, Link, Move, Plan
from megarl.resharding.transports.transport import view

BUFFERS = 2

Result = TypeVar("Result")
_Deliveries = Generator[tuple[Copy, torch.Tensor], None, Result]
"""Delivers what arrives meanwhile, and returns a result."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a process group, the holders of a plan, find each other. A Channel.

    host, port    of a TCPStore that one of them has
    name          tells the group from others that meet there
    timeout_s     how long a member waits for another
    """

    host: str
    port: int
    name: str
    timeout_s: float

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan) -> PointToPoint:
        """Does not wait for the others: connections are made when they are used."""
        return PointToPoint(self, member, parameters, plan)


class _Hop(NamedTuple):
    """tag: tells it from others of the same link."""

    bucket: int
    link: Link
    tag: int


@dataclass
class _Message:
    """A bucket in hand, by its number.

    arriving    the receipt that has not been waited for
    leaving     the sends that have not been waited for
    """

    bucket: int
    buffer: torch.Tensor
    arriving: dist.Work | None = None
    sender: int | None = None
    leaving: list[dist.Work] = field(default_factory=list)


class PointToPoint:
    """One member's end. After an error it is closed, which ends the others' waiting for it: a new meeting is needed."""

    def __init__(self, meeting: Meeting, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan):
        self._member, self._parameters, self._plan = member, parameters, plan
        self._rank = plan.holders.index(member)
        self._hops = _own_hops(plan, self._rank)
        self._neighbours: set[int] = set()
        """Those that it has talked to."""
        is_destination = self._rank >= plan.num_sources
        copies = plan.into(member).copies if is_destination else ()
        self._dtypes = {(copy.source, copy.move.source.parameter): copy.move.source_dtype for copy in copies}
        self._group: dist.Backend | None = _process_group(meeting, self._rank, len(plan.holders))
        # An engine's rank may have another device than the process's first.
        self._device = next(iter(parameters.values())).device
        self._in_hand: deque[_Message] = deque()
        self.staging_bytes = 0

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """As the plan has it; the source checks that this is so."""
        if (source, parameter) not in self._dtypes:
            raise ValueError(f"{source} sends {self._member} no parameter {parameter}")
        return getattr(torch, self._dtypes[source, parameter])

    def send(self) -> int:
        """What this member, a source only, has for the others. Returns the bytes sent."""
        for _ in self.deliver(()):
            raise AssertionError(f"{self._member} is a source only")
        return sum(self._plan.buckets[hop.bucket].num_bytes for hop in self._hops)

    @torch.no_grad()
    def deliver(self, copies: Sequence[Copy]) -> Iterator[tuple[Copy, torch.Tensor]]:
        """copies: all that the plan has into this member. Raises RuntimeError where another member has failed, or does
        not answer in time."""
        try:
            yield from self._exchange()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connections, and with them the waiting of others for this member."""
        group, self._group = self._group, None
        if group is not None:
            _end_connections(group, self._neighbours, unused_tag=len(self._hops))
        self._in_hand.clear()

    def _exchange(self) -> Iterator[tuple[Copy, torch.Tensor]]:
        """In the order of the plan, of which every member follows its part: see schedule.ordered."""
        if self._group is None:
            raise RuntimeError(f"{self._member}: its connections are closed since an exchange failed")
        free = self._buffers()
        for hop in self._hops:
            if hop.link.source == self._rank:
                message = yield from self._filled(hop, free)
                message.leaving.append(self._begin(self._group.send, hop.link.destination, message, hop.tag))
            else:
                message = yield from self._taken(hop.bucket, free)
                message.sender = hop.link.source
                message.arriving = self._begin(self._group.recv, hop.link.source, message, hop.tag)
        while self._in_hand:
            yield from self._settle_oldest(free)

    def _buffers(self) -> list[torch.Tensor]:
        sizes = {hop.bucket: self._plan.buckets[hop.bucket].num_bytes for hop in self._hops}
        size, count = max(sizes.values(), default=0), min(len(sizes), BUFFERS)
        self.staging_bytes = size * count
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def _begin(self, operation: Callable[..., dist.Work], neighbour: int, message: _Message, tag: int) -> dist.Work:
        self._neighbours.add(neighbour)
        size = self._plan.buckets[message.bucket].num_bytes
        return operation([message.buffer[:size]], neighbour, tag)

    def _filled(self, hop: _Hop, free: list[torch.Tensor]) -> _Deliveries[_Message]:
        """With what the hop takes along."""
        for message in self._in_hand:
            if message.bucket == hop.bucket:
                yield from self._arrive(message)
                return message
        bucket = self._plan.buckets[hop.bucket]
        handed_on = hop.link in bucket.onward
        if self._rank >= self._plan.num_sources and not handed_on:  # it may be anything that has been received
            for message in self._in_hand:
                yield from self._arrive(message)
        message = yield from self._taken(hop.bucket, free)
        self._pack(bucket.onward_moves if handed_on else bucket.moves, message.buffer)
        return message

    def _pack(self, moves: Iterable[Move], buffer: torch.Tensor) -> None:
        for move, part in _parts(moves, buffer):
            source = self._parameters[move.source.parameter]
            if source.dtype != getattr(torch, move.source_dtype):
                raise ValueError(f"{self._member} has {move.source.parameter} as {source.dtype}, the plan as {move}")
            part.copy_(view(source, move.source.rectangle))

    def _taken(self, bucket: int, free: list[torch.Tensor]) -> _Deliveries[_Message]:
        """A message of its own, with a buffer to be filled."""
        if not free:
            yield from self._settle_oldest(free)
        self._in_hand.append(_Message(bucket, free.pop()))
        return self._in_hand[-1]

    def _settle_oldest(self, free: list[torch.Tensor]) -> Iterator[tuple[Copy, torch.Tensor]]:
        message = self._in_hand[0]
        yield from self._arrive(message)
        while message.leaving:
            message.leaving[0].wait()
            message.leaving.pop(0)
        free.append(self._in_hand.popleft().buffer)

    def _arrive(self, message: _Message) -> Iterator[tuple[Copy, torch.Tensor]]:
        """Waits for what is received, and delivers it."""
        if message.arriving is not None:
            message.arriving.wait()
            message.arriving = None
            sender, moves = self._plan.holders[message.sender], self._plan.buckets[message.bucket].moves
            yield from ((Copy(sender, self._member, move), part) for move, part in _parts(moves, message.buffer))


def _own_hops(plan: Plan, rank: int) -> list[_Hop]:
    """In their order. Both ends of a link count its hops alike."""
    assert plan.order or not plan.buckets, "a plan without an order; see schedule.ordered"
    counts: Counter[Link] = Counter()
    hops = []
    for bucket, link in plan.order:
        if rank in link:
            hops.append(_Hop(bucket, link, counts[link]))
            counts[link] += 1
    return hops


def _parts(moves: Iterable[Move], buffer: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
    """The moves and their elements in the buffer: larger dtypes first, so that all are aligned."""
    offset = 0
    for move in sorted(moves, key=lambda move: -getattr(torch, move.destination_dtype).itemsize):
        dtype, shape = getattr(torch, move.destination_dtype), torch.Size(shape_of(move.destination.rectangle))
        end = offset + shape.numel() * dtype.itemsize
        yield move, buffer[offset:end].view(dtype).view(shape)
        offset = end


def _process_group(meeting: Meeting, rank: int, size: int) -> dist.Backend:
    timeout = timedelta(seconds=meeting.timeout_s)
    store = dist.PrefixStore(
        meeting.name,
        dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout),
    )
    if device.backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Members connect when they first talk to each other: most pairs never do.
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _end_connections(group: dist.Backend, neighbours: Iterable[int], unused_tag: int) -> None:
    """neighbours: whom the group is connected to."""
    if device.backend() == "nccl":
        group.abort()
        return
    # Gloo closes all connections of a member that waits too long for any of them, and has no other way: to drop the
    # group while something comes in can hang. Connections that are broken already fail without a wait.
    for neighbour in neighbours:
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], neighbour, unused_tag).wait(timedelta(milliseconds=1))
