"""Schedule the buckets in a plan by simulating the network ports of all processes."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from megarl.core.collector import without_collector
from megarl.resharding.planning.communicators import communicators
from megarl.resharding.planning.plan import Hop, Link, Plan


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of one process in bytes per second per direction (full duplex). `inter` applies between nodes and
    `intra` inside a node. A message has a fixed cost of `latency` seconds."""

    inter: float
    intra: float
    latency: float = 0.0


class Transfer(NamedTuple):
    """The simulated transfer of a bucket, given by its index in the plan, over one link.

    Times are in seconds from the start of the refit.
    """

    bucket: int
    link: Link
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The simulated transfers of a plan. Transfers are in plan order; each starts when its ports are free. `seconds` is
    the end of the last transfer. `floor_seconds` is a lower bound for all schedules of this plan: bytes through the
    busiest port, divided by its bandwidth."""

    transfers: tuple[Transfer, ...]
    seconds: float
    floor_seconds: float


TYPICAL = Bandwidth(inter=1.0, intra=8.0)
"""Relative bandwidths used to order hops. Ratios of 8 and 18 give equally good orders."""


@without_collector()
def ordered(plan: Plan) -> Plan:
    """Return a copy of the plan with an order for its hops, and with the communicators that the hops need.

    Processes that execute their own hops in this order cannot deadlock: at any time, both ends of the first unfinished
    hop have finished all their earlier hops. This is true whether a process executes all its hops strictly in order,
    or keeps the order only within each communicator.
    """
    return replace(plan, order=tuple(_Simulation(plan, TYPICAL).run()), communicators=communicators(plan))


def schedule(plan: Plan, bandwidth: Bandwidth, messages: Sequence[int] = ()) -> Schedule:
    """Simulate the transfers in an ordered plan.

    Every process has one port per direction for transfers between nodes, and one per direction inside its node. A port
    carries one bucket at a time, in plan order. A transfer inside a node occupies both directions of both processes,
    because a process executes the operations in a communicator one by one. Forwarding starts when the bucket has
    arrived. Casts, packing and copies within a device are assumed to take no time. `messages` contains the number of
    messages per bucket, each of which adds latency; if it is empty, latency is ignored.
    """
    assert plan.order or not plan.buckets, "the plan has no order. Call ordered() first"
    speeds = bandwidth.inter, bandwidth.intra
    load, free, arrived = (defaultdict(float) for _ in range(3))
    transfers = []
    for number, link in plan.order:
        bucket = plan.buckets[number]
        out, into, seconds = _ports(plan, number, link, speeds)
        # A destination can forward a bucket only after receiving it. If it forwards data in a separate bucket, it must
        # first have received all earlier buckets.
        arrival = (number, link.source) if link in bucket.forwards else link.source
        if plan.is_local(link):
            transfers.append(Transfer(number, link, arrived[arrival], arrived[arrival]))
            continue
        is_sent = not (plan.devices and plan.is_node_local(link))  # otherwise, the destination reads directly
        occupied = [("out", out), ("in", into)]
        if is_sent and plan.nodes[link.source] == plan.nodes[link.destination]:
            occupied += [("in", out), ("out", into)]
        start = max(arrived[arrival], *(free[port] for port in occupied))
        stop = start + seconds + (bandwidth.latency * messages[number] if messages and is_sent else 0)
        free.update(dict.fromkeys(occupied, stop))
        arrived[number, link.destination] = stop
        arrived[link.destination] = max(arrived[link.destination], stop)
        load["out", out] += seconds
        load["in", into] += seconds
        transfers.append(Transfer(number, link, start, stop))
    return Schedule(tuple(transfers), max(free.values(), default=0.0), max(load.values(), default=0.0))


Port = int
"""2 · holder index, plus 1 for the port inside the node. Incoming and outgoing ports are separate (see _Direction)."""


class _Waiting(NamedTuple):
    """A transfer that has not started yet."""

    bucket: int
    link: Link
    seconds: float


class _Direction:
    """All outgoing ports, or all incoming ports."""

    def __init__(self) -> None:
        self.pending_seconds: dict[Port, float] = defaultdict(float)
        """port -> total duration in seconds of its transfers that have not started."""
        self.partners: dict[Port, dict[Port, deque[_Waiting]]] = defaultdict(dict)
        """port -> partner port -> transfers between the two ports that are ready to start."""
        self._free: tuple[list[tuple[float, Port]], ...] = ([], [])
        """Free ports between nodes, and free ports inside nodes, in descending order of pending seconds."""
        self._key: dict[Port, tuple[float, Port]] = {}

    def release(self, port: Port) -> None:
        self._key[port] = -self.pending_seconds[port], port
        insort(self._free[port % 2], self._key[port])

    def take(self, port: Port) -> None:
        self._free[port % 2].remove(self._key.pop(port))

    def is_free(self, port: Port) -> bool:
        return port in self._key

    def best(self, partners: dict[Port, deque[_Waiting]], inside: int) -> Port | None:
        """Return the free partner port with the most pending work, or None if all are busy."""
        free = self._free[inside]
        if len(partners) < len(free):
            return min((self._key[port] for port in partners if port in self._key), default=(0, None))[1]
        return next((port for _, port in free if port in partners), None)


class _Simulation:
    """Simulates greedy list scheduling: among the free ports, those with the most pending work start first."""

    def __init__(self, plan: Plan, bandwidth: Bandwidth):
        self._plan, self._speeds = plan, (bandwidth.inter, bandwidth.intra)
        self._out, self._in = _Direction(), _Direction()
        self._touched: tuple[set[Port], set[Port]] = (set(), set())
        self._running: list[tuple[float, int, Port, Port, _Waiting]] = []
        self._order: list[Hop] = []
        self._forwards: list[dict[int, list[Link]]] = [_by_source(bucket.forwards) for bucket in plan.buckets]
        self._deferred: dict[int, list[tuple[int, Link]]] = defaultdict(list)
        """destination -> (bucket, link) of its forwards in separate buckets. They start once the destination has
        received all its buckets."""
        self._missing: dict[int, int] = defaultdict(int)
        """destination -> number of transfers that have not arrived yet, excluding those in `_deferred`."""

    def run(self) -> list[Hop]:
        self._load()
        for side in (self._out, self._in):
            for port in side.pending_seconds:
                side.release(port)
        now = 0.0
        self._start(now)
        while self._running:
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._end(*heappop(self._running)[2:])
            self._start(now)
        assert len(self._order) == sum(len(bucket.links) + len(bucket.forwards) for bucket in self._plan.buckets)
        return self._order

    def _load(self) -> None:
        for number, bucket in enumerate(self._plan.buckets):
            for link in (*bucket.links, *bucket.forwards):
                if not self._plan.is_local(link):
                    out, into, seconds = _ports(self._plan, number, link, self._speeds)
                    self._out.pending_seconds[out] += seconds
                    self._in.pending_seconds[into] += seconds
                    for side, port in self._ends(out, into):
                        side.pending_seconds[port] += 0
                if link.source < self._plan.num_sources or link in bucket.forwards:
                    self._missing[link.destination] += 1
            for link in bucket.links:
                if link.source >= self._plan.num_sources:
                    self._deferred[link.source].append((number, link))
                elif not self._plan.is_local(link):
                    self._offer(number, link)
        for number, bucket in enumerate(self._plan.buckets if self._plan.devices else ()):
            for link in bucket.links:
                if self._plan.is_local(link):
                    self._order.append(Hop(number, link))
                    self._arrived(number, link)

    def _offer(self, bucket: int, link: Link) -> None:
        """Mark a transfer as ready to start."""
        out, into, seconds = _ports(self._plan, bucket, link, self._speeds)
        queue = self._out.partners[out].setdefault(into, deque())
        self._in.partners[into][out] = queue
        queue.append(_Waiting(bucket, link, seconds))
        self._touched[0].add(out)
        self._touched[1].add(into)

    def _start(self, now: float) -> None:
        """Start all transfers that can start. Ports with the most pending work choose first."""
        outs, ins = self._touched
        sides = ((self._in, ins), (self._out, outs))
        waiting = [(-side.pending_seconds[port], i, port) for i, (side, ports) in enumerate(sides) for port in ports]
        outs.clear()
        ins.clear()
        for _, is_out, port in sorted(waiting):
            same, opposite = (self._out, self._in) if is_out else (self._in, self._out)
            if same.is_free(port):
                partner = opposite.best(same.partners[port], port % 2)
                if partner is not None:
                    self._run(now, *((port, partner) if is_out else (partner, port)))

    def _run(self, now: float, out: Port, into: Port) -> None:
        queue = self._out.partners[out][into]
        waiting = queue.popleft()
        if not queue:
            del self._out.partners[out][into], self._in.partners[into][out]
        for side, port in self._ends(out, into):
            side.take(port)
        self._out.pending_seconds[out] -= waiting.seconds
        self._in.pending_seconds[into] -= waiting.seconds
        stop = now + waiting.seconds
        heappush(self._running, (stop, len(self._order), out, into, waiting))
        self._order.append(Hop(waiting.bucket, waiting.link))

    def _end(self, out: Port, into: Port, done: _Waiting) -> None:
        for side, port in self._ends(out, into):
            side.release(port)
            self._touched[side is self._in].add(port)
        self._arrived(done.bucket, done.link)

    def _ends(self, out: Port, into: Port) -> tuple[tuple[_Direction, Port], ...]:
        """Return the ports that a transfer occupies: inside a node, both directions of both ends."""
        if out % 2:
            return (self._out, out), (self._in, into), (self._in, out), (self._out, into)
        return (self._out, out), (self._in, into)

    def _arrived(self, bucket: int, link: Link) -> None:
        """Mark the transfers that waited for this arrival as ready to start."""
        destination = link.destination
        for forward in self._forwards[bucket].pop(destination, ()):
            self._offer(bucket, forward)
        self._missing[destination] -= 1
        if self._missing[destination] == 0:
            for deferred in self._deferred.pop(destination, ()):
                self._offer(*deferred)


def _ports(plan: Plan, bucket: int, link: Link, speeds: tuple[float, float]) -> tuple[Port, Port, float]:
    """Return the sending port, the receiving port and the duration of a transfer. speeds: (inter, intra)."""
    inside = int(plan.nodes[link.source] == plan.nodes[link.destination])
    return 2 * link.source + inside, 2 * link.destination + inside, plan.buckets[bucket].num_bytes / speeds[inside]


def _by_source(links: Iterable[Link]) -> dict[int, list[Link]]:
    grouped: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        grouped[link.source].append(link)
    return grouped
