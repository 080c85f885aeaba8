"""Weights sent from process to process, on one machine or between several: over gloo on CPU, over NCCL on GPU.

The members have a process group of their own, so that neither the trainer's nor the engine's is disturbed. The buckets
of the plan are the messages, and every member has two buffers for them: one is filled or emptied while the other is on
its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl import device
from megarl.resharding.piece import shape_of
from megarl.resharding.plan import Bucket, Copy, Link, Move, Plan
from megarl.resharding.transports.transport import view

BUFFERS = 2


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


class _Message(NamedTuple):
    """A bucket that is on its way, by its number in the plan."""

    tag: int
    bucket: Bucket
    buffer: torch.Tensor
    works: list[dist.Work]


class PointToPoint:
    """One member's end. After an error it is closed, which ends the others' waiting for it: a new meeting is needed."""

    def __init__(self, meeting: Meeting, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan):
        self._member, self._parameters, self._holders = member, parameters, plan.holders
        self._rank = plan.holders.index(member)
        self._is_destination = self._rank >= plan.num_sources
        self._buckets = [(tag, bucket) for tag, bucket in enumerate(plan.buckets) if self._has(bucket)]
        self._neighbours: set[int] = set()
        """Those that it has talked to."""
        self._unused_tag = len(plan.buckets)
        copies = plan.into(member).copies if self._is_destination else ()
        self._dtypes = {(copy.source, copy.move.source.parameter): copy.move.source_dtype for copy in copies}
        self._group: dist.Backend | None = _process_group(meeting, self._rank, len(plan.holders))
        # An engine's rank may have another device than the process's first.
        self._device = next(iter(parameters.values())).device
        self._under_way: deque[_Message] = deque()
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
        return sum(bucket.num_bytes * len(self._receivers(bucket.links)) for _, bucket in self._buckets)

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
            _end_connections(group, self._neighbours, self._unused_tag)
        self._under_way.clear()

    def _exchange(self) -> Iterator[tuple[Copy, torch.Tensor]]:
        """In the order of the plan, of which every member follows its part: so nobody waits for one who waits for him,
        directly or by way of others."""
        if self._group is None:
            raise RuntimeError(f"{self._member}: its connections are closed since an exchange failed")
        size = max((bucket.num_bytes for _, bucket in self._buckets), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self._buckets[:BUFFERS]]
        self.staging_bytes = size * len(buffers)
        for i, (tag, bucket) in enumerate(self._buckets):
            receivers = self._receivers(bucket.links)
            # What a destination sends under a plan's links is what it has received under earlier ones.
            most_under_way = 0 if receivers and self._is_destination else BUFFERS - 1
            while len(self._under_way) > most_under_way:
                yield from self._finish_first()
            buffer = buffers[i % BUFFERS][: bucket.num_bytes]
            begin = self._send_packed if receivers else self._receive
            self._under_way.append(_Message(tag, bucket, buffer, begin(tag, bucket, buffer)))
        while self._under_way:
            yield from self._finish_first()

    def _send_packed(self, tag: int, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        for move, part in _parts(bucket, buffer):
            source = self._parameters[move.source.parameter]
            if source.dtype != getattr(torch, move.source_dtype):
                raise ValueError(f"{self._member} has {move.source.parameter} as {source.dtype}, the plan as {move}")
            part.copy_(view(source, move.source.rectangle))
        return self._send(tag, buffer, bucket.links)

    def _send(self, tag: int, buffer: torch.Tensor, links: Iterable[Link]) -> list[dist.Work]:
        receivers = self._receivers(links)
        self._neighbours.update(receivers)
        return [self._group.send([buffer], receiver, tag) for receiver in receivers]

    def _receive(self, tag: int, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        sender = self._sender(bucket)
        self._neighbours.add(sender)
        return [self._group.recv([buffer], sender, tag)]

    def _finish_first(self) -> Iterator[tuple[Copy, torch.Tensor]]:
        """Waits for the oldest message. One that has come in is handed on, and delivered."""
        self._wait_for_first()
        tag, bucket, buffer, works = self._under_way[0]
        if not self._receivers(bucket.links):
            works += self._send(tag, buffer, bucket.onward)
            sender = self._holders[self._sender(bucket)]
            yield from ((Copy(sender, self._member, move), part) for move, part in _parts(bucket, buffer))
            self._wait_for_first()
        self._under_way.popleft()

    def _wait_for_first(self) -> None:
        works = self._under_way[0].works
        while works:
            works[0].wait()
            works.pop(0)

    def _has(self, bucket: Bucket) -> bool:
        return any(self._rank in link for link in (*bucket.links, *bucket.onward))

    def _receivers(self, links: Iterable[Link]) -> list[int]:
        """Of what this member sends."""
        return [link.destination for link in links if link.source == self._rank]

    def _sender(self, bucket: Bucket) -> int:
        """Of what this member receives."""
        [sender] = [link.source for link in (*bucket.links, *bucket.onward) if link.destination == self._rank]
        return sender


def _parts(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
    """The moves and their elements in the buffer: larger dtypes first, so that all are aligned."""
    offset = 0
    for move in sorted(bucket.moves, key=lambda move: -getattr(torch, move.destination_dtype).itemsize):
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
