"""Makes the plan, without talking to anybody: from what sources and destinations hold to what moves between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from megarl.core.collector import without_collector
from megarl.core.errors import UserError
from megarl.resharding.piece import ITEM_BYTES, Holder, Place, Rectangle, cut, num_elements
from megarl.resharding.planning.balance import Balance, Way
from megarl.resharding.planning.holdings import Kept, divide, holdings, shards_of
from megarl.resharding.planning.plan import Bucket, Link, Move, Padding, Plan

MIB = 2**20
LARGEST_BUCKET, SMALLEST_BUCKET = 256 * MIB, MIB
BUCKETS_OF_A_DESTINATION = 64
"""The number of buckets that fill a destination: while one is under way, little of the whole waits for it."""
SMALLEST_PART = MIB
"""The bytes of the smallest part that is cut for the sake of balance."""


@without_collector()
def make_plan(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int | None = None) -> Plan:
    """Returns the plan in which every element of every destination comes from exactly one source, directly or by way of
    another destination on its node.

    bucket_bytes    bytes of a buffer that travels, at most (None: a 64th of the largest destination, at most 256 MiB)

    Raises UserError for an element that no source holds.
    """
    return _Planner(sources, destinations, bucket_bytes or bucket_size(destinations)).plan()


def bucket_size(destinations: Sequence[Holder]) -> int:
    """Returns the bytes of a bucket, where the caller does not say."""
    largest = max((shard.num_bytes for shard in shards_of(destinations)), default=0)
    return min(max(largest // BUCKETS_OF_A_DESTINATION, SMALLEST_BUCKET), LARGEST_BUCKET)


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
            owners = held.get(tensor, {})
            cuts, keeps = tuple(owners), list(owners.values())
            for wanted, wanting in rectangles.items():
                division = divide(cuts, wanted)
                if division.missing:
                    raise UserError(f"{tensor}: no source holds the elements {_range(division.missing)}")
                for part, numbers in division.parts:
                    self._send(part, [keep for number in numbers for keep in keeps[number]], wanting)
        return Plan(
            holders=tuple(holder.name for holder in self._holders),
            nodes=tuple(holder.node for holder in self._holders),
            num_sources=len(self._sources),
            buckets=(*self._first.closed(), *self._later.closed()),
            padding=tuple(self._padding()),
            devices=self._devices if any(device is not None for device in self._devices) else (),
        )

    def _send(self, part: Rectangle, having: list[Kept], wanting: list[Kept]) -> None:
        """Plans a canonical rectangle, from those who have it to those who want it."""
        if len(having) == len(wanting) == 1:
            [giver], [taker] = having, wanting
            for slab, way in self._ways(part, giver.holders, taker.holders, taker.dtype):
                self._first.add(way, _move(slab, giver, taker))
            return
        givers = {holder: kept for kept in reversed(having) for holder in kept.holders}
        for takers in _rounds(wanting):
            for slab, way in self._ways(part, tuple(sorted(givers)), tuple(sorted(takers)), wanting[0].dtype):
                self._send_apart(slab, way, givers, takers)

    def _ways(
        self, part: Rectangle, having: tuple[int, ...], wanting: tuple[int, ...], dtype: str
    ) -> Iterator[tuple[Rectangle, Way]]:
        """Yields slabs of the rectangle that fit a bucket and that replicas can share evenly, and how each travels."""
        size, rows = num_elements(part) * ITEM_BYTES[dtype], part[0][1] - part[0][0]
        shares = min(self._balance.even_parts(having, wanting), max(1, size // SMALLEST_PART))
        rows_in_bucket = max(1, self._bucket_bytes * rows // size)
        needed = -(-rows // rows_in_bucket)
        count = shares * -(-needed // shares)
        for slab in [part] if count == 1 else cut(part, count):
            yield slab, self._balance.way(having, wanting, num_elements(slab) * ITEM_BYTES[dtype])

    def _send_apart(self, slab: Rectangle, way: Way, givers: dict[int, Kept], takers: dict[int, Kept]) -> None:
        """Plans a slab that not all who have it, or who want it, keep at the same place: links between the same places
        are together."""
        links: dict[tuple[Kept, Kept], list[Link]] = defaultdict(list)
        for link in way.links:
            links[givers[link.source], takers[link.destination]].append(link)
        alike = [link for link in way.onward if takers[link.source] == takers[link.destination]]
        for (giver, taker), group in links.items():
            entries = {link.destination for link in group}
            onward = tuple(link for link in alike if link.source in entries)
            self._first.add(Way(tuple(group), onward), _move(slab, giver, taker))
        for link in way.onward:
            if link not in alike:
                move = _move(slab, takers[link.source], takers[link.destination])
                self._later.add(Way((link,), ()), move)

    def _padding(self) -> Iterable[Padding]:
        for shard, holders in shards_of(self._destinations, first=len(self._sources)).items():
            places = tuple(Place(p.local, p.local_rectangle) for p in shard.pieces if p.canonical is None)
            if places:
                yield Padding(holders, places)


class _Buckets:
    """Buckets of moves that go the same way."""

    def __init__(self, limit: int):
        self._limit = limit
        self._open: dict[Way, tuple[list[Move], int]] = {}
        self._full: dict[Way, list[Bucket]] = defaultdict(list)

    def add(self, way: Way, move: Move) -> None:
        num_bytes = num_elements(move.destination.rectangle) * ITEM_BYTES[move.destination_dtype]
        moves, size = self._open.get(way, ([], 0))
        if moves and size + num_bytes > self._limit:
            self._full[way].append(Bucket(*way, tuple(moves), size))
            moves, size = [], 0
        moves.append(move)
        self._open[way] = moves, size + num_bytes

    def closed(self) -> list[Bucket]:
        """Returns one bucket of each way after the other: so all sources have something to send from the start."""
        queues = ([*self._full[way], Bucket(*way, tuple(moves), size)] for way, (moves, size) in self._open.items())
        return [bucket for turn in zip_longest(*queues) for bucket in turn if bucket is not None]


def _rounds(wanting: list[Kept]) -> list[dict[int, Kept]]:
    """Returns rounds of holder -> what it wants; a holder that keeps the same elements twice gets them twice."""
    rounds: list[dict[int, Kept]] = []
    for kept in wanting:
        for holder in kept.holders:
            free = next((takers for takers in rounds if holder not in takers), None)
            if free is None:
                rounds.append(free := {})
            free[holder] = kept
    return rounds


def _move(slab: Rectangle, giver: Kept, taker: Kept) -> Move:
    return Move(giver.part(slab), taker.part(slab), giver.dtype, taker.dtype)


def _range(rectangle: Rectangle) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in rectangle) + "]"
