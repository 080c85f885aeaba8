"""Sends weights from process to process, on one machine or between several: over gloo on CPU, over NCCL on GPU.

The members have a process group of their own, so that neither the trainer's nor the engine's is disturbed. The buckets
of the plan travel in its order, and every member has two buffers for them: one is filled or emptied while the other is
on its way. A move that is large and lies in one stretch of a parameter needs none. A bucket that is to leave again when
its buffer has been used for others is packed anew.

NCCL knows no tags: a bucket's way over a link is a batch of messages, and a member does the batches of a communicator
one after the other. Both ends begin it in the plan's order, and so it matches. Nobody waits for ever, by the same
order. Take the first hop that is never done: all before it are done, its ends wait for nothing else, neither for a
buffer nor for another batch of its communicator, and so both come to it. That is true even where a GPU has room for one
operation at a time, and when a neighbour's first batch connects the two, for which NCCL keeps the host waiting.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megarl.core import device
from megarl.resharding.piece import Place
from megarl.resharding.planning.plan import Bucket, Copy, Hop, Link, Move, Plan
from megarl.resharding.transports.bucket_layout import BucketLayout, Part, lay_out
from megarl.resharding.transports.nccl_group import NcclGroup
from megarl.resharding.transports.transport import Delivered, Delivery
from megarl.resharding.transports.waiter import Waiter

BUFFERS = 2
UNUSED_TAG, NOTHING = 2**31 - 1, torch.empty(1, dtype=torch.uint8)
"""The tag and the message that nobody sends."""
CHECK_S = 1.0
"""The interval at which a member that waits for another looks whether they are still connected."""

Result = TypeVar("Result")
_Deliveries = Generator[Delivered, None, Result]
"""A generator that delivers what arrives meanwhile, and returns a result."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store where the members of a process group, the holders of a plan, find each other. A Channel.

    host, port    of a TCPStore that one of them has
    name          tells the group from others that meet there
    timeout_s     how long a member waits for another
    """

    host: str
    port: int
    name: str
    timeout_s: float

    def open(
        self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True
    ) -> PointToPoint:
        """Opens a member's end without waiting for the others: connections are made when they are used."""
        return PointToPoint(self, member, parameters, plan, in_place)


class Begun(NamedTuple):
    """A send to a neighbour, or a receipt from one."""

    neighbour: int
    work: dist.Work


@dataclass
class Message:
    """A bucket in hand, by its number.

    sender      who sends it to this member; None where nothing is to be delivered, or no longer
    arriving    receipts that have not been waited for
    leaving     sends that have not been waited for
    """

    bucket: int
    buffer: torch.Tensor
    layout: BucketLayout
    sender: int | None = None
    arriving: list[Begun] = field(default_factory=list)
    leaving: list[Begun] = field(default_factory=list)


class PointToPoint:
    """One member's end. After an error it is closed, which ends the others' waiting for it; they need a new one."""

    def __init__(
        self, rendezvous: Rendezvous, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool
    ):
        self._member, self._plan = member, plan
        self._parameters, self._in_place = parameters if in_place else {}, in_place
        self._rank = plan.holders.index(member)
        travels = any(bucket.links or bucket.onward for bucket in plan.buckets)
        assert plan.order or not travels, "a plan without an order; see schedule.ordered"
        self._hops = [hop for hop in plan.order if self._rank in hop.link]
        self._tags: Counter[Link] = Counter()
        """The number of messages of each link so far, which both ends count alike."""
        self._neighbours: set[int] = set()
        """The members that it has talked to."""
        self._used_links: set[Link] = set()
        """The links over which it has sent or received."""
        is_destination = self._rank >= plan.num_sources
        copies = plan.into(member).copies if is_destination else ()
        self._dtypes = {(copy.source, copy.move.source.parameter): copy.move.source_dtype for copy in copies}
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._store = _store(rendezvous)
        # An engine's rank may have another device than the process's first.
        self._device = next(iter(parameters.values())).device
        self._group: dist.ProcessGroupGloo | NcclGroup | None = (
            NcclGroup(self._store, self._timeout, self._rank, plan, self._device)
            if device.uses_nccl()
            else _gloo_group(self._store, self._timeout, self._rank, len(plan.holders))
        )
        self._is_connected = False
        """Whether NCCL's communicators are created."""
        self._in_hand: deque[Message] = deque()
        self._leaving = Counter(hop.bucket for hop in self._hops if hop.link.source == self._rank)
        """How often each bucket is sent by this member."""
        self._kept: dict[int, torch.Tensor] = {}
        """The buckets that this member has received and is to hand on, where it has no parameters of the plan's to pack
        them from again."""
        self.staging_bytes = 0
        self.sent_bytes = 0

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Returns the dtype that the plan has; the source checks that this is so."""
        if (source, parameter) not in self._dtypes:
            raise ValueError(f"{source} sends {self._member} no parameter {parameter}")
        return getattr(torch, self._dtypes[source, parameter])

    def send(self) -> int:
        """Sends what this member, a source only, has for the others. Returns the bytes over all links."""
        for _ in self.deliver(()):
            raise AssertionError(f"{self._member} is a source only")
        return self.sent_bytes

    @torch.no_grad()
    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Delivers all copies that the plan has into this member. Raises RuntimeError that names another member which
        has failed, or does not answer in time."""
        self.sent_bytes = 0
        self._tags.clear()
        try:
            with closing(Waiter()) as self._waiter:
                self._check_open()
                if device.uses_nccl() and not self._is_connected:
                    self._create_communicators()
                yield from self._exchange()
            device.synchronize(self._device)  # what came in a buffer is in its place
            self._kept.clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connections, and with them the waiting of others for this member."""
        group, self._group = self._group, None
        if group is not None:
            _end_connections(group, self._neighbours)
        self._in_hand.clear()

    @cached_property
    def _layouts(self) -> dict[int, BucketLayout]:
        """The layout of each bucket, by its number."""
        return {number: self._lay_out(self._plan.buckets[number]) for number, _ in self._hops}

    def _lay_out(self, bucket: Bucket) -> BucketLayout:
        return lay_out(self._places(bucket), self._parameters)

    def _places(self, bucket: Bucket) -> list[tuple[Move, Place]]:
        """Returns the bucket's moves, and where their elements are at this member. Raises ValueError where it has them
        in another dtype than planned."""
        gives = any(link.source == self._rank for link in bucket.links)
        for move in bucket.moves if gives else ():
            actual = self._parameters[move.source.parameter].dtype
            if actual != getattr(torch, move.source_dtype):
                raise ValueError(f"{self._member} has {move.source.parameter} as {actual}, the plan as {move}")
        return [(move, move.source if gives else move.destination) for move in bucket.moves]

    def _exchange(self) -> Delivery:
        """Does this member's hops in the order of the plan, of which every member follows its part: see
        schedule.ordered."""
        free = self._buffers()
        for hop in self._hops:
            if hop.link.source == self._rank:
                message = yield from self._filled(hop, free)
                message.leaving += self._send(message, hop.link)
            else:
                message = yield from self._taken(hop.bucket, free)
                message.sender = hop.link.source
                message.arriving += self._receive(message, hop.link)
        while self._in_hand:
            yield from self._settle_oldest(free)

    def _check_open(self) -> None:
        if self._group is None:
            raise RuntimeError(f"{self._member}: its connections are closed since an exchange failed")

    def _create_communicators(self) -> None:
        for number in self._group.numbers:
            members = self._plan.communicators[number].members
            self._meet(f"communicator {number}", [member for member in members if member != self._rank])
            self._group.create(number)
        self._is_connected = True

    def _buffers(self) -> list[torch.Tensor]:
        size = max((layout.num_bytes for layout in self._layouts.values()), default=0)
        count = min(len(self._layouts), BUFFERS)
        self.staging_bytes = size * count
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def _send(self, message: Message, link: Link) -> list[Begun]:
        self.sent_bytes += self._plan.buckets[message.bucket].num_bytes
        tensors = message.layout.messages(self._parameters, message.buffer)
        return self._begin("send", link, link.destination, *tensors)

    def _receive(self, message: Message, link: Link) -> list[Begun]:
        tensors = message.layout.messages(self._parameters, message.buffer)
        return self._begin("recv", link, link.source, *tensors)

    def _begin(
        self, operation: Literal["send", "recv"], link: Link, neighbour: int, *tensors: torch.Tensor
    ) -> list[Begun]:
        """Begins to send messages or to receive them. Over NCCL they are a batch."""
        if device.uses_nccl() and link not in self._used_links:
            self._meet(f"from {link.source} to {link.destination}", [neighbour])
        begin = getattr(self._group, operation)
        with self._naming(neighbour):
            if device.uses_nccl():
                works = [begin(tensors, link, neighbour)]
            else:
                works = [begin([tensor], neighbour, self._next_tag(link)) for tensor in tensors]
        self._neighbours.add(neighbour)
        self._used_links.add(link)
        return [Begun(neighbour, work) for work in works]

    def _next_tag(self, link: Link) -> int:
        """Returns the tag of the link's next message."""
        self._tags[link] += 1
        return self._tags[link] - 1

    def _meet(self, what: str, others: Sequence[int]) -> None:
        """Waits until the others are as far: to create a communicator, or to connect two of its members in the first
        batch of each direction, NCCL waits without a deadline."""
        keys = [f"{what}: {member}" for member in others]
        self._store.set(f"{what}: {self._rank}", "here")
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:
            absent = (member for member, key in zip(others, keys, strict=True) if not self._store.check([key]))
            with self._naming(next(absent, others[0])):
                raise

    def _wait(self, begun: list[Begun]) -> None:
        """Waits until all of it is done, and empties the list.

        Gloo tells of the end of a connection, but not to what has travelled in part: that would wait until its time is
        over. So another thread waits for it, while this one looks after the connections.
        """
        if device.uses_nccl():
            self._complete(begun)
        elif begun:
            self._waiter.begin(partial(self._complete, tuple(begun)))
            while self._waiter.goes_on(CHECK_S):
                for neighbour in {neighbour for neighbour, _ in begun}:
                    with self._naming(neighbour):
                        _receive_unused(self._group, neighbour)
        begun.clear()

    def _complete(self, begun: Iterable[Begun]) -> None:
        for neighbour, work in begun:
            with self._naming(neighbour):
                work.wait()

    @contextmanager
    def _naming(self, neighbour: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self._member}: with {self._plan.holders[neighbour]}: {error}") from error

    def _filled(self, hop: Hop, free: list[torch.Tensor]) -> _Deliveries[Message]:
        """Returns the message of a hop, filled with its bucket."""
        for message in self._in_hand:
            if message.bucket == hop.bucket:
                yield from self._arrive(message)
                return message
        if self._rank >= self._plan.num_sources:  # what it sends may be under way to it
            for message in self._in_hand:
                yield from self._arrive(message)
        message = yield from self._taken(hop.bucket, free)
        if hop.bucket in self._kept:
            message.buffer[: len(self._kept[hop.bucket])] = self._kept[hop.bucket]
        else:
            self._pack(message)
        return message

    def _pack(self, message: Message) -> None:
        for part in message.layout.parts:
            if part.start is not None:
                part.in_buffer(message.buffer).copy_(part.of(self._parameters))

    def _taken(self, bucket: int, free: list[torch.Tensor]) -> _Deliveries[Message]:
        """Returns a message whose buffer is to be filled, once one is free."""
        if not free:
            yield from self._settle_oldest(free)
        self._in_hand.append(Message(bucket, free.pop(), self._layouts[bucket]))
        return self._in_hand[-1]

    def _settle_oldest(self, free: list[torch.Tensor]) -> Delivery:
        message = self._in_hand[0]
        yield from self._arrive(message)
        self._wait(message.leaving)
        if not self._in_place and self._leaving[message.bucket]:
            self._kept[message.bucket] = message.buffer[: message.layout.num_bytes].clone()
        free.append(self._in_hand.popleft().buffer)

    def _arrive(self, message: Message) -> Delivery:
        """Waits for what is received, and delivers it."""
        if message.sender is None:
            return
        self._wait(message.arriving)
        sender, message.sender = self._plan.holders[message.sender], None
        for part, elements in self._unpacked(message):
            yield Copy(sender, self._member, part.move), elements

    def _unpacked(self, message: Message) -> Iterator[tuple[Part, torch.Tensor | None]]:
        """Yields the parts and their elements as a transport delivers them."""
        for part in message.layout.parts:
            yield part, None if part.start is None else part.in_buffer(message.buffer)


def _store(rendezvous: Rendezvous) -> dist.Store:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    return dist.PrefixStore(
        rendezvous.name,
        dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout),
    )


def _gloo_group(store: dist.Store, timeout: timedelta, rank: int, size: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_network_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _network_device() -> dist.ProcessGroupGloo.Device:
    """Returns gloo's device, of the interface that GLOO_SOCKET_IFNAME names, as torch's own groups have it, or of
    several the first; without it of the one with the address of the host's name. Members connect when they first talk
    to each other: most pairs never do."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=True)


def _end_connections(group: dist.ProcessGroupGloo | NcclGroup, neighbours: Iterable[int]) -> None:
    """Ends a group's connections. neighbours: whom it is connected to."""
    if device.uses_nccl():
        group.abort()
        return
    # Gloo closes all connections of a member that waits too long for any of them, and has no other way: to drop the
    # group while something comes in can hang. Connections that are broken already fail without a wait.
    for neighbour in neighbours:
        with suppress(RuntimeError):
            _receive_unused(group, neighbour).wait(timedelta(milliseconds=1))


def _receive_unused(group: dist.ProcessGroupGloo, neighbour: int) -> dist.Work:
    """Begins to receive what nobody sends. Raises RuntimeError where the connection has ended."""
    return group.recv([NOTHING], neighbour, UNUSED_TAG)
