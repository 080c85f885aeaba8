"""Build a plan from the pieces of sources and destinations, without communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from megarl.core.collector import without_collector
from megarl.core.errors import UserError
from megarl.resharding.piece import ITEM_BYTES, Holder, Place, Rectangle, cut, num_elements
from megarl.resharding.planning.balance import Balance, Route
from megarl.resharding.planning.holdings import Held, divide, holdings, shards_of
from megarl.resharding.planning.messages import move_bytes
from megarl.resharding.planning.plan import Bucket, Link, Move, Padding, Plan

MIB = 2**20
LARGEST_BUCKET, SMALLEST_BUCKET = 256 * MIB, MIB
BUCKETS_PER_DESTINATION = 64
"""Default number of buckets per destination. With more buckets, a late bucket delays fewer weights."""
SMALLEST_PART = MIB
"""Minimum size in bytes of a part that is split off only to balance the load on sources."""


@without_collector()
def make_plan(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int | None = None) -> Plan:
    """Return a plan in which every destination element comes from exactly one source.

    Elements arrive directly from the source or through a different destination on the same node. Raise a UserError if a
    destination needs an element that no source holds.

    Args:
        bucket_bytes: maximum size of a bucket in bytes. None: 1/64 of the largest destination, at least 1 MiB and at
            most 256 MiB.
    """
    return _Planner(sources, destinations, bucket_bytes or bucket_size(destinations)).plan()


def bucket_size(destinations: Sequence[Holder]) -> int:
    """Return the default size of a bucket in bytes."""
    largest = max((shard.num_bytes for shard in shards_of(destinations)), default=0)
    return min(max(largest // BUCKETS_PER_DESTINATION, SMALLEST_BUCKET), LARGEST_BUCKET)


class _Planner:
    def __init__(self, sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int):
        self._sources, self._destinations, self._bucket_bytes = sources, destinations, bucket_bytes
        self._holders = (*sources, *destinations)
        self._devices = tuple(holder.device for holder in self._holders)
        self._balance = Balance([holder.node for holder in self._holders], self._devices)
        self._first, self._later = _Buckets(bucket_bytes), _Buckets(bucket_bytes)

    def plan(self) -> Plan:
        held = holdings(self._sources)
        for tensor, rectangles in holdings(self._destinations, first=len(self._sources)).items():
            source_rectangles = held.get(tensor, {})
            source_places = list(source_rectangles.values())
            for wanted, destinations in rectangles.items():
                division = divide(tuple(source_rectangles), wanted)
                if division.missing:
                    spans = ", ".join(f"{start}:{stop}" for start, stop in division.missing)
                    raise UserError(
                        f"{tensor}: no source has the elements [{spans}]. Fix: use the same model config for source "
                        "and destination"
                    )
                for part, numbers in division.parts:
                    sources = [place for number in numbers for place in source_places[number]]
                    self._plan_part(part, sources, destinations)
        return Plan(
            holders=tuple(holder.name for holder in self._holders),
            nodes=tuple(holder.node for holder in self._holders),
            num_sources=len(self._sources),
            buckets=(*self._first.closed(), *self._later.closed()),
            padding=tuple(self._padding()),
            devices=self._devices if any(device is not None for device in self._devices) else (),
        )

    def _plan_part(self, part: Rectangle, sources: list[Held], destinations: list[Held]) -> None:
        """Add the copies of a canonical rectangle from its sources to its destinations."""
        if len(sources) == len(destinations) == 1:
            [source], [destination] = sources, destinations
            for slab, route in self._routes(part, source.holders, destination.holders, destination.dtype):
                self._first.add(route, _move(slab, source, destination))
            return
        senders = {holder: held for held in reversed(sources) for holder in held.holders}
        for receivers in _rounds(destinations):
            ranks = tuple(sorted(senders)), tuple(sorted(receivers))
            for slab, route in self._routes(part, *ranks, destinations[0].dtype):
                self._plan_slab(slab, route, senders, receivers)

    def _routes(
        self, part: Rectangle, sources: tuple[int, ...], destinations: tuple[int, ...], dtype: str
    ) -> Iterator[tuple[Rectangle, Route]]:
        """Split the rectangle into slabs that fit a bucket and balance the replicas. Yield each slab and its route."""
        size, rows = num_elements(part) * ITEM_BYTES[dtype], part[0][1] - part[0][0]
        shares = min(self._balance.even_parts(sources, destinations), max(1, size // SMALLEST_PART))
        rows_in_bucket = max(1, self._bucket_bytes * rows // size)
        needed = -(-rows // rows_in_bucket)
        count = shares * -(-needed // shares)
        for slab in [part] if count == 1 else cut(part, count):
            yield slab, self._balance.route(sources, destinations, num_elements(slab) * ITEM_BYTES[dtype])

    def _plan_slab(self, slab: Rectangle, route: Route, senders: dict[int, Held], receivers: dict[int, Held]) -> None:
        """Add the moves for a slab that its senders or receivers store at different places.

        Links between the same places share a bucket. A receiver forwards within that bucket if the next receiver stores
        the slab at the same place; otherwise, it forwards the slab later with a separate move.
        """
        links: dict[tuple[Held, Held], list[Link]] = defaultdict(list)
        for link in route.links:
            links[senders[link.source], receivers[link.destination]].append(link)
        same_place = [link for link in route.forwards if receivers[link.source] == receivers[link.destination]]
        for (sender, receiver), shared in links.items():
            entries = {link.destination for link in shared}
            forwards = tuple(link for link in same_place if link.source in entries)
            self._first.add(Route(tuple(shared), forwards), _move(slab, sender, receiver))
        for link in route.forwards:
            if link not in same_place:
                move = _move(slab, receivers[link.source], receivers[link.destination])
                self._later.add(Route((link,), ()), move)

    def _padding(self) -> Iterable[Padding]:
        for shard, holders in shards_of(self._destinations, first=len(self._sources)).items():
            places = tuple(Place(p.local, p.local_rectangle) for p in shard.pieces if p.canonical is None)
            if places:
                yield Padding(holders, places)


class _Buckets:
    """Packs the moves of each route into buckets."""

    def __init__(self, limit: int):
        self._limit = limit
        self._open: dict[Route, tuple[list[Move], int]] = {}
        self._full: dict[Route, list[Bucket]] = defaultdict(list)

    def add(self, route: Route, move: Move) -> None:
        num_bytes = move_bytes(move)
        moves, size = self._open.get(route, ([], 0))
        if moves and size + num_bytes > self._limit:
            self._full[route].append(Bucket(*route, tuple(moves), size))
            moves, size = [], 0
        moves.append(move)
        self._open[route] = moves, size + num_bytes

    def closed(self) -> list[Bucket]:
        """Return all buckets, alternating between routes so that every source can start sending immediately."""
        queues = (
            [*self._full[route], Bucket(*route, tuple(moves), size)] for route, (moves, size) in self._open.items()
        )
        return [bucket for turn in zip_longest(*queues) for bucket in turn if bucket is not None]


def _rounds(destinations: list[Held]) -> list[dict[int, Held]]:
    """Divide the destinations into rounds with at most one place per holder.

    A holder that stores the elements twice is in two rounds.
    """
    rounds: list[dict[int, Held]] = []
    for held in destinations:
        for holder in held.holders:
            current = next((receivers for receivers in rounds if holder not in receivers), None)
            if current is None:
                rounds.append(current := {})
            current[holder] = held
    return rounds


def _move(slab: Rectangle, source: Held, destination: Held) -> Move:
    return Move(source.part(slab), destination.part(slab), source.dtype, destination.dtype)
