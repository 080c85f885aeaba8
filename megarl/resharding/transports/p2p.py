"""Send weights between processes on one or more machines, over gloo on CPU and over NCCL on GPU.

The members have their own process group, separate from those of trainers and engines. Buckets are sent in plan order.
Every member has two buffers, so one can be packed or unpacked while the other is in flight. Large contiguous moves
bypass the buffers. If a bucket must be sent again after its buffer has been reused, it is packed again.

NCCL has no tags. A hop is one batch of messages, and a member executes the batches in a communicator one by one. Both
ends start their batches in plan order, so the batches match. The same order prevents deadlocks. Consider the first hop
that never finishes: all earlier hops are finished, so its ends wait neither for buffers nor for earlier batches in
the communicator, and both reach the hop. This is true even if a GPU can run only one operation at a time, and for the
first batch between two ranks, which blocks the host while NCCL connects them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from megarl.core import device
from megarl.resharding.piece import Place
from megarl.resharding.planning.plan import Bucket, Copy, Hop, Link, Move, Plan
from megarl.resharding.transports.bucket_layout import BucketLayout, lay_out
from megarl.resharding.transports.gloo_group import gloo_group
from megarl.resharding.transports.nccl_group import NcclGroup
from megarl.resharding.transports.transport import Delivered, Delivery
from megarl.resharding.transports.waiter import Waiter

BUFFERS = 2
UNUSED_TAG, DUMMY = 2**31 - 1, torch.empty(1, dtype=torch.uint8)
"""Tag and buffer of a message that is never sent. See _probe."""
CHECK_S = 1.0
"""Seconds between connection checks while a member waits for its peers."""

Result = TypeVar("Result")
_Deliveries = Generator[Delivered, None, Result]
"""A generator that yields the copies that arrive in the meantime, and then returns a result."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A Channel: the TCPStore through which the holders of a plan connect to each other.

    Attributes:
        host, port: address of the TCPStore.
        name: prefix in the store, unique per process group.
        timeout_s: how long a member waits for its peers, in seconds.
    """

    host: str
    port: int
    name: str
    timeout_s: float

    def open(
        self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True
    ) -> PointToPoint:
        """Open a member's end. Does not wait for the remaining members: connections are established on first use."""
        return PointToPoint(self, member, parameters, plan, in_place)


class PendingOp(NamedTuple):
    """A pending send to a neighbor, or a pending receive from a neighbor."""

    neighbor: int
    work: dist.Work


@dataclass
class Message:
    """A bucket in flight.

    Attributes:
        bucket: index of the bucket in the plan.
        sender: rank that sends the bucket to this member; None if no rank does, or once it has been delivered.
        receives: receive operations that have not been waited for.
        sends: send operations that have not been waited for.
    """

    bucket: int
    buffer: torch.Tensor
    layout: BucketLayout
    sender: int | None = None
    receives: list[PendingOp] = field(default_factory=list)
    sends: list[PendingOp] = field(default_factory=list)


class PointToPoint:
    """One member's end of the connections.

    An error closes the instance. This interrupts all members that wait for it; they then need new instances.
    """

    def __init__(
        self, rendezvous: Rendezvous, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool
    ):
        self._member, self._plan = member, plan
        self._parameters, self._in_place = parameters if in_place else {}, in_place
        self._rank = plan.holders.index(member)
        has_hops = any(bucket.links or bucket.forwards for bucket in plan.buckets)
        assert plan.order or not has_hops, "the plan has no order. Call schedule.ordered() first"
        self._hops = [hop for hop in plan.order if self._rank in hop.link]
        self._tags: Counter[Link] = Counter()
        """Number of messages per link so far. Both ends have the same count."""
        self._neighbors: set[int] = set()
        """Peers that this member has exchanged messages with."""
        self._connected_links: set[Link] = set()
        is_destination = self._rank >= plan.num_sources
        copies = plan.into(member).copies if is_destination else ()
        self._dtypes = {(copy.source, copy.move.source.parameter): copy.move.source_dtype for copy in copies}
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._store = _store(rendezvous)
        # The device of an engine rank may differ from the process's current device.
        self._device = next(iter(parameters.values())).device
        self._group: ProcessGroupGloo | NcclGroup | None = (
            NcclGroup(self._store, self._timeout, self._rank, plan, self._device)
            if device.uses_nccl()
            else gloo_group(self._store, self._timeout, self._rank, len(plan.holders))
        )
        self._is_connected = False
        """Whether the NCCL communicators have been created."""
        self._in_flight: deque[Message] = deque()
        self._num_sends = Counter(hop.bucket for hop in self._hops if hop.link.source == self._rank)
        """Number of times that this member sends each bucket."""
        self._to_forward: dict[int, torch.Tensor] = {}
        """Copies of received buckets to forward, if the member has no live parameters from which to pack them again."""
        self.staging_bytes = 0
        self.sent_bytes = 0

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """Return the planned dtype of the parameter. The source checks that its parameter has this dtype."""
        if (source, parameter) not in self._dtypes:
            raise ValueError(f"{source} does not send parameter {parameter} to {self._member}")
        return getattr(torch, self._dtypes[source, parameter])

    def send(self) -> int:
        """Send all buckets from this member, which must be a source. Return the number of bytes sent over all links."""
        for _ in self.deliver(()):
            raise AssertionError(f"{self._member} is a source but received data")
        return self.sent_bytes

    @torch.no_grad()
    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Deliver all copies into this member. Raise a RuntimeError that names a peer that fails or is too slow."""
        self.sent_bytes = 0
        self._tags.clear()
        try:
            with closing(Waiter()) as self._waiter:
                group = self._open_group
                if isinstance(group, NcclGroup) and not self._is_connected:
                    self._create_communicators(group)
                yield from self._exchange()
            device.synchronize(self._device)  # wait until all copies from the buffers have finished
            self._to_forward.clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections, which also interrupts members that wait for this one."""
        group, self._group = self._group, None
        if group is not None:
            _close_connections(group, self._neighbors)
        self._in_flight.clear()

    @cached_property
    def _layouts(self) -> dict[int, BucketLayout]:
        """The layouts of buckets at this member: bucket index -> layout."""
        buckets = {number: self._plan.buckets[number] for number, _ in self._hops}
        return {number: lay_out(self._places(bucket), self._parameters) for number, bucket in buckets.items()}

    def _places(self, bucket: Bucket) -> list[tuple[Move, Place]]:
        """Return the moves in the bucket with the places of their elements at this member. Raise a ValueError if a
        source parameter does not have the planned dtype."""
        is_source = any(link.source == self._rank for link in bucket.links)
        for move in bucket.moves if is_source else ():
            actual = self._parameters[move.source.parameter].dtype
            if actual != getattr(torch, move.source_dtype):
                raise ValueError(
                    f"{move.source.parameter} of {self._member} is {actual}, but the plan expects {move.source_dtype}: "
                    f"{move}. Fix: rebuild the plan with this model's dtypes"
                )
        return [(move, move.source if is_source else move.destination) for move in bucket.moves]

    def _exchange(self) -> Delivery:
        """Execute this member's hops in plan order; see schedule.ordered."""
        free = self._buffers()
        for hop in self._hops:
            if hop.link.source == self._rank:
                message = yield from self._fill_message(hop, free)
                message.sends += self._send(message, hop.link)
            else:
                message = yield from self._new_message(hop.bucket, free)
                message.sender = hop.link.source
                message.receives += self._receive(message, hop.link)
        while self._in_flight:
            yield from self._retire_oldest(free)

    @property
    def _open_group(self) -> ProcessGroupGloo | NcclGroup:
        if self._group is None:
            raise RuntimeError(f"{self._member}: the connections are closed because an earlier exchange failed")
        return self._group

    def _create_communicators(self, group: NcclGroup) -> None:
        for number in group.numbers:
            members = self._plan.communicators[number].members
            self._barrier(f"communicator {number}", [member for member in members if member != self._rank])
            group.create(number)
        self._is_connected = True

    def _buffers(self) -> list[torch.Tensor]:
        size = max((layout.num_bytes for layout in self._layouts.values()), default=0)
        count = min(len(self._layouts), BUFFERS)
        self.staging_bytes = size * count
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def _send(self, message: Message, link: Link) -> list[PendingOp]:
        self.sent_bytes += self._plan.buckets[message.bucket].num_bytes
        tensors = message.layout.messages(self._parameters, message.buffer)
        return self._begin("send", link, link.destination, *tensors)

    def _receive(self, message: Message, link: Link) -> list[PendingOp]:
        tensors = message.layout.messages(self._parameters, message.buffer)
        return self._begin("recv", link, link.source, *tensors)

    def _begin(
        self, operation: Literal["send", "recv"], link: Link, neighbor: int, *tensors: torch.Tensor
    ) -> list[PendingOp]:
        """Start sending or receiving messages. Over NCCL, they form one batch."""
        if device.uses_nccl() and link not in self._connected_links:
            self._barrier(f"from {link.source} to {link.destination}", [neighbor])
        begin = getattr(self._group, operation)
        with self._naming(neighbor):
            if device.uses_nccl():
                works = [begin(tensors, link, neighbor)]
            else:
                works = [begin([tensor], neighbor, self._next_tag(link)) for tensor in tensors]
        self._neighbors.add(neighbor)
        self._connected_links.add(link)
        return [PendingOp(neighbor, work) for work in works]

    def _next_tag(self, link: Link) -> int:
        """Return the tag of the link's next message."""
        self._tags[link] += 1
        return self._tags[link] - 1

    def _barrier(self, name: str, others: Sequence[int]) -> None:
        """Wait until the given members reach the same barrier.

        Called before NCCL creates a communicator, and before the first batch in each direction, which connects the two
        ranks. NCCL waits for peers without a timeout.
        """
        keys = [f"{name}: {member}" for member in others]
        self._store.set(f"{name}: {self._rank}", "here")
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:
            absent = (member for member, key in zip(others, keys, strict=True) if not self._store.check([key]))
            with self._naming(next(absent, others[0])):
                raise

    def _wait(self, pending: list[PendingOp]) -> None:
        """Wait for all operations and clear the list.

        When a connection breaks, gloo does not fail operations that are partly transferred; they block until their
        timeout. Therefore, a separate thread waits for the operations while this one probes the connections.
        """
        group = self._open_group
        if isinstance(group, NcclGroup):
            self._complete(pending)
        elif pending:
            self._waiter.begin(partial(self._complete, tuple(pending)))
            while self._waiter.is_pending(CHECK_S):
                for neighbor in {neighbor for neighbor, _ in pending}:
                    with self._naming(neighbor):
                        _probe(group, neighbor)
        pending.clear()

    def _complete(self, pending: Iterable[PendingOp]) -> None:
        for neighbor, work in pending:
            with self._naming(neighbor):
                work.wait()

    @contextmanager
    def _naming(self, neighbor: int) -> Iterator[None]:
        """Add the names of both members to the message of a RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            peer = self._plan.holders[neighbor]
            raise RuntimeError(
                f"{self._member}: exchange with {peer}: {error}. Fix: look for the first error in the log of {peer}"
            ) from error

    def _fill_message(self, hop: Hop, free: list[torch.Tensor]) -> _Deliveries[Message]:
        """Pack the hop's bucket into a message, and return the message."""
        for message in self._in_flight:
            if message.bucket == hop.bucket:
                yield from self._arrive(message)
                return message
        if self._rank >= self._plan.num_sources:  # a destination first receives the elements that it forwards
            for message in self._in_flight:
                yield from self._arrive(message)
        message = yield from self._new_message(hop.bucket, free)
        if hop.bucket in self._to_forward:
            message.buffer[: len(self._to_forward[hop.bucket])] = self._to_forward[hop.bucket]
        else:
            for part in message.layout.parts:
                elements = part.in_buffer(message.buffer)
                if elements is not None:
                    elements.copy_(part.of(self._parameters))
        return message

    def _new_message(self, bucket: int, free: list[torch.Tensor]) -> _Deliveries[Message]:
        """Return a message with an unused buffer. Waits until a buffer is free."""
        if not free:
            yield from self._retire_oldest(free)
        self._in_flight.append(Message(bucket, free.pop(), self._layouts[bucket]))
        return self._in_flight[-1]

    def _retire_oldest(self, free: list[torch.Tensor]) -> Delivery:
        message = self._in_flight[0]
        yield from self._arrive(message)
        self._wait(message.sends)
        if not self._in_place and self._num_sends[message.bucket]:
            self._to_forward[message.bucket] = message.buffer[: message.layout.num_bytes].clone()
        free.append(self._in_flight.popleft().buffer)

    def _arrive(self, message: Message) -> Delivery:
        """Wait for the receive operations of a message and deliver its copies."""
        if message.sender is None:
            return
        self._wait(message.receives)
        sender, message.sender = self._plan.holders[message.sender], None
        for part in message.layout.parts:
            yield Copy(sender, self._member, part.move), part.in_buffer(message.buffer)


def _store(rendezvous: Rendezvous) -> PrefixStore:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(rendezvous.name, store)


def _close_connections(group: ProcessGroupGloo | NcclGroup, neighbors: Iterable[int]) -> None:
    """Close a group's connections to its neighbors."""
    if isinstance(group, NcclGroup):
        group.abort()
        return
    # A timed-out operation is the only way to make gloo close all of a member's connections: destroying the group while
    # data is arriving can hang. Operations on broken connections fail immediately.
    for neighbor in neighbors:
        with suppress(RuntimeError):
            _probe(group, neighbor).wait(timedelta(milliseconds=1))


def _probe(group: ProcessGroupGloo, neighbor: int) -> dist.Work:
    """Start receiving a message that is never sent. Raise a RuntimeError if the connection is closed."""
    return group.recv(  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs
        [DUMMY], neighbor, UNUSED_TAG
    )
