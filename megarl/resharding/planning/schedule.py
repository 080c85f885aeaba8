"""Decides when each bucket of a plan travels, by a simulation of all processes' ports."""

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
    """The bytes per second that one process sends, and at the same time receives: to other nodes, and inside its own.
    latency: the seconds of each message beside its bytes."""

    inter: float
    intra: float
    latency: float = 0.0


class Transfer(NamedTuple):
    """One bucket, by its number in the plan, over one link; times are in seconds from the start."""

    bucket: int
    link: Link
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which everything in a plan travels.

    transfers      the transfers in the order of the plan, each when its ports are free
    seconds        the time until the last one has ended
    floor_seconds  the time below which no schedule of this plan is: what the busiest port carries, over its bandwidth
    """

    transfers: tuple[Transfer, ...]
    seconds: float
    floor_seconds: float


TYPICAL = Bandwidth(inter=1.0, intra=8.0)
"""The bandwidth that orders are made for. They depend little on it: 8 or 18 times faster inside a node makes the same
order good."""


@without_collector()
def ordered(plan: Plan) -> Plan:
    """Returns the plan with the order of what travels, and the communicators for it.

    If each process does its own hops in this order, none waits for one that waits for it: before the first hop that is
    not done, all is done at both of its ends. This is so whatever else of theirs has to be done before: what goes over
    the same communicator, or all.
    """
    return replace(plan, order=tuple(_Simulation(plan, TYPICAL).run()), communicators=communicators(plan))


def schedule(plan: Plan, bandwidth: Bandwidth, messages: Sequence[int] = ()) -> Schedule:
    """Returns when each hop of an ordered plan begins and ends. messages: of each bucket; none where they take no time
    beside their bytes.

    Every process has a port for each direction, to other nodes and inside its own; each carries one bucket at a time,
    in the plan's order. What is sent inside a node takes both directions, because a process does the operations of a
    communicator one after the other. What is handed on starts when its bucket has arrived. Casting, packing and copies
    on a device take no time here.
    """
    assert plan.order or not plan.buckets, "a plan without an order; see ordered"
    speeds = bandwidth.inter, bandwidth.intra
    load, free, arrived = (defaultdict(float) for _ in range(3))
    transfers = []
    for number, link in plan.order:
        bucket = plan.buckets[number]
        out, into, seconds = _ports(plan, number, link, speeds)
        # A hop that begins at a destination waits for the bucket that it hands on, or for all that it has received.
        arrival = (number, link.source) if link in bucket.forwards else link.source
        if plan.is_local(link):
            transfers.append(Transfer(number, link, arrived[arrival], arrived[arrival]))
            continue
        is_sent = not (plan.devices and plan.is_node_local(link))  # else it is read where it lies
        taken = [("out", out), ("in", into)]
        if is_sent and plan.nodes[link.source] == plan.nodes[link.destination]:
            taken += [("in", out), ("out", into)]
        start = max(arrived[arrival], *(free[port] for port in taken))
        stop = start + seconds + (bandwidth.latency * messages[number] if messages and is_sent else 0)
        free.update(dict.fromkeys(taken, stop))
        arrived[number, link.destination] = stop
        arrived[link.destination] = max(arrived[link.destination], stop)
        load["out", out] += seconds
        load["in", into] += seconds
        transfers.append(Transfer(number, link, start, stop))
    return Schedule(tuple(transfers), max(free.values(), default=0.0), max(load.values(), default=0.0))


Port = int
"""The number of the holder, times two, plus 1 for the inside of its node; incoming and outgoing ports are counted
apart. Inside a node a transfer takes both, see schedule."""


class _Waiting(NamedTuple):
    """A transfer that has not started."""

    bucket: int
    link: Link
    seconds: float


class _Side:
    """The outgoing ports, or the incoming ones."""

    def __init__(self) -> None:
        self.left: dict[Port, float] = defaultdict(float)
        """The seconds of transfers that have not started."""
        self.partners: dict[Port, dict[Port, deque[_Waiting]]] = defaultdict(dict)
        """The partners of each port: port -> with whom it has transfers that could start now."""
        self._free: tuple[list[tuple[float, Port]], ...] = ([], [])
        """The free ports to other nodes, and those inside; those with the most left first."""
        self._key: dict[Port, tuple[float, Port]] = {}

    def release(self, port: Port) -> None:
        self._key[port] = -self.left[port], port
        insort(self._free[port % 2], self._key[port])

    def take(self, port: Port) -> None:
        self._free[port % 2].remove(self._key.pop(port))

    def is_free(self, port: Port) -> bool:
        return port in self._key

    def best(self, partners: dict[Port, deque[_Waiting]], inside: int) -> Port | None:
        """Returns the free one of these ports that has the most left to do."""
        free = self._free[inside]
        if len(partners) < len(free):
            return min((self._key[port] for port in partners if port in self._key), default=(0, None))[1]
        return next((port for _, port in free if port in partners), None)


class _Simulation:
    """The simulation, in which of the free ports the two with the most left to do come together first."""

    def __init__(self, plan: Plan, bandwidth: Bandwidth):
        self._plan, self._speeds = plan, (bandwidth.inter, bandwidth.intra)
        self._out, self._in = _Side(), _Side()
        self._touched: tuple[set[Port], set[Port]] = (set(), set())
        self._running: list[tuple[float, int, Port, Port, _Waiting]] = []
        self._order: list[Hop] = []
        self._onward: list[dict[int, list[Link]]] = [_by_source(bucket.forwards) for bucket in plan.buckets]
        self._later: dict[int, list[tuple[int, Link]]] = defaultdict(list)
        """The links that wait for all that arrives: destination -> links that begin there in other buckets than those
        that have just arrived."""
        self._missing: dict[int, int] = defaultdict(int)
        """The numbers of missing transfers: destination -> those that have not arrived, without those of `_later`."""

    def run(self) -> list[Hop]:
        self._load()
        for side in (self._out, self._in):
            for port in side.left:
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
                    self._out.left[out] += seconds
                    self._in.left[into] += seconds
                    for side, port in self._ends(out, into):
                        side.left[port] += 0
                if link.source < self._plan.num_sources or link in bucket.forwards:
                    self._missing[link.destination] += 1
            for link in bucket.links:
                if link.source >= self._plan.num_sources:
                    self._later[link.source].append((number, link))
                elif not self._plan.is_local(link):
                    self._offer(number, link)
        for number, bucket in enumerate(self._plan.buckets if self._plan.devices else ()):
            for link in bucket.links:
                if self._plan.is_local(link):
                    self._order.append(Hop(number, link))
                    self._arrived(number, link)

    def _offer(self, bucket: int, link: Link) -> None:
        """Makes a transfer one of those that can start."""
        out, into, seconds = _ports(self._plan, bucket, link, self._speeds)
        queue = self._out.partners[out].setdefault(into, deque())
        self._in.partners[into][out] = queue
        queue.append(_Waiting(bucket, link, seconds))
        self._touched[0].add(out)
        self._touched[1].add(into)

    def _start(self, now: float) -> None:
        """Starts all that can start. Ports with the most left to do choose first."""
        outs, ins = self._touched
        sides = ((self._in, ins), (self._out, outs))
        waiting = [(-side.left[port], i, port) for i, (side, ports) in enumerate(sides) for port in ports]
        outs.clear(), ins.clear()
        for _, is_out, port in sorted(waiting):
            mine, theirs = (self._out, self._in) if is_out else (self._in, self._out)
            if mine.is_free(port):
                partner = theirs.best(mine.partners[port], port % 2)
                if partner is not None:
                    self._run(now, *((port, partner) if is_out else (partner, port)))

    def _run(self, now: float, out: Port, into: Port) -> None:
        queue = self._out.partners[out][into]
        waiting = queue.popleft()
        if not queue:
            del self._out.partners[out][into], self._in.partners[into][out]
        for side, port in self._ends(out, into):
            side.take(port)
        self._out.left[out] -= waiting.seconds
        self._in.left[into] -= waiting.seconds
        stop = now + waiting.seconds
        heappush(self._running, (stop, len(self._order), out, into, waiting))
        self._order.append(Hop(waiting.bucket, waiting.link))

    def _end(self, out: Port, into: Port, done: _Waiting) -> None:
        for side, port in self._ends(out, into):
            side.release(port)
            self._touched[side is self._in].add(port)
        self._arrived(done.bucket, done.link)

    def _ends(self, out: Port, into: Port) -> tuple[tuple[_Side, Port], ...]:
        """Returns what a transfer takes: inside a node, both directions of both ends."""
        if out % 2:
            return (self._out, out), (self._in, into), (self._in, out), (self._out, into)
        return (self._out, out), (self._in, into)

    def _arrived(self, bucket: int, link: Link) -> None:
        """Offers what waited for this arrival."""
        destination = link.destination
        for forwards in self._onward[bucket].pop(destination, ()):
            self._offer(bucket, forwards)
        self._missing[destination] -= 1
        if self._missing[destination] == 0:
            for later in self._later.pop(destination, ()):
                self._offer(*later)


def _ports(plan: Plan, bucket: int, link: Link, speeds: tuple[float, float]) -> tuple[Port, Port, float]:
    """Returns the ports at which a bucket leaves and arrives, and its seconds. speeds: to other nodes, and inside."""
    inside = int(plan.nodes[link.source] == plan.nodes[link.destination])
    return 2 * link.source + inside, 2 * link.destination + inside, plan.buckets[bucket].num_bytes / speeds[inside]


def _by_source(links: Iterable[Link]) -> dict[int, list[Link]]:
    grouped: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        grouped[link.source].append(link)
    return grouped
