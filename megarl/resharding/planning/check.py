"""Prove that a plan writes every destination element exactly once, with the correct value.

The proof is independent of the planner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

from megarl.resharding.piece import Holder, Piece, Place, Rectangle, Shard, contains, intersect, num_elements, whole
from megarl.resharding.planning.messages import move_bytes
from megarl.resharding.planning.plan import Bucket, Hop, Link, Move, Plan


class PlanError(ValueError):
    """A plan would leave an element unwritten, write it twice, or write a wrong value."""


def check_plan(plan: Plan, sources: Sequence[Holder], destinations: Sequence[Holder]) -> None:
    """Raise a PlanError unless all of these conditions hold:

    - Buckets and padding tile every parameter of every destination: each element is written exactly once.
    - Nothing else is written: every byte that is sent is stored.
    - Each move has the same canonical coordinates at both ends of each link; padding has no canonical coordinates.
    - Each move has the dtypes of the parameters at its two ends.
    - A destination forwards only elements that it has already received.
    - The order, if the plan has one, contains every hop exactly once.

    Holders with the same shard and the same moves are checked once.
    """
    _Check(plan, sources, destinations).run()


class _Check:
    def __init__(self, plan: Plan, sources: Sequence[Holder], destinations: Sequence[Holder]):
        holders = (*sources, *destinations)
        described = tuple((holder.name, holder.node, holder.device) for holder in holders), len(sources)
        devices = plan.devices or [None] * len(plan.holders)
        if described != (tuple(zip(plan.holders, plan.nodes, devices, strict=True)), plan.num_sources):
            raise PlanError("the plan was made for different holders, nodes or devices")
        for names in (plan.holders[: plan.num_sources], plan.destinations):
            if len(set(names)) < len(names):
                raise PlanError("two sources or two destinations have the same name")
        self._plan = plan
        self._shards = [holder.shard for holder in holders]
        self._parameters = {shard: _Parameters(shard) for shard in self._shards}

    def run(self) -> None:
        for bucket in self._plan.buckets:
            self._check_links(bucket)
            self._check_moves(bucket)
        for padding in self._plan.padding:
            for holder in padding.holders:
                self._check_number(holder)
            for shard in {self._shards[holder] for holder in padding.holders}:
                for place in padding.places:
                    if not self._parameters[shard].is_padding(place):
                        raise PlanError(f"the plan zeroes elements that are not padding: {place}")
        self._check_coverage()
        self._check_order()
        self._check_forwards()

    def _check_number(self, holder: int) -> None:
        if not self._plan.num_sources <= holder < len(self._shards):
            raise PlanError(f"{holder} is not the index of a destination")

    def _check_links(self, bucket: Bucket) -> None:
        entries = {link.destination for link in bucket.links}
        for link in (*bucket.links, *bucket.forwards):
            self._check_number(link.destination)
        for link in bucket.links:
            if not 0 <= link.source < len(self._shards):
                raise PlanError(f"{link.source} is not the index of a holder")
        for link in bucket.forwards:
            if link.source not in entries:
                raise PlanError(f"{self._plan.holders[link.source]} forwards elements that it has not received: {link}")

    def _check_moves(self, bucket: Bucket) -> None:
        senders = {self._shards[link.source] for link in bucket.links}
        receivers = {self._shards[link.destination] for link in (*bucket.links, *bucket.forwards)}
        for move in bucket.moves:
            source, destination = (move.source, move.source_dtype), (move.destination, move.destination_dtype)
            sent = {self._canonical(shard, *source, move, "source does not have") for shard in senders}
            stored = {self._canonical(shard, *destination, move, "destination does not store") for shard in receivers}
            if len(sent | stored) != 1:
                raise PlanError(f"the source sends {sorted(sent)}, but the destination stores {sorted(stored)}: {move}")
        size = sum(map(move_bytes, bucket.moves))
        if size != bucket.num_bytes:
            raise PlanError(f"a bucket declares num_bytes={bucket.num_bytes}, but its moves have {size} bytes")

    def _canonical(self, shard: Shard, place: Place, dtype: str, move: Move, lacks: str) -> tuple[str, Rectangle]:
        canonical = self._parameters[shard].canonical(place)
        if canonical is None:
            raise PlanError(f"the {lacks} the elements of {move}")
        if shard.dtypes[place.parameter] != dtype:
            actual = shard.dtypes[place.parameter]
            raise PlanError(f"{place.parameter} is {actual}, but the move declares {dtype}: {move}")
        return canonical

    def _check_coverage(self) -> None:
        """Check one destination out of each set with the same shard and the same received places."""
        written = self._written()
        received: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for receivers in written:
            for holder in receivers:
                received[holder].append(receivers)
        kinds: dict[tuple[Shard, tuple[tuple[int, ...], ...]], int] = {}
        for holder in range(self._plan.num_sources, len(self._shards)):
            kinds.setdefault((self._shards[holder], tuple(received[holder])), holder)
        for (shard, keys), holder in kinds.items():
            places = (place for receivers in keys for place in written[receivers])
            _check_tiling(self._plan.holders[holder], shard, places)

    def _written(self) -> dict[tuple[int, ...], list[Place]]:
        """Return receivers -> written places. A holder that receives a bucket twice is listed twice."""
        written: dict[tuple[int, ...], list[Place]] = defaultdict(list)
        for bucket in self._plan.buckets:
            receivers = tuple(link.destination for link in (*bucket.links, *bucket.forwards))
            written[receivers] += (move.destination for move in bucket.moves)
        for padding in self._plan.padding:
            written[padding.holders] += padding.places
        return written

    def _check_order(self) -> None:
        if not self._plan.order:
            return
        missing = Counter(self._hops())
        missing.subtract(self._plan.order)
        for hop, times in missing.items():
            if times:
                raise PlanError(f"the order contains {hop} {1 - times} times instead of once")

    def _hops(self) -> Iterator[Hop]:
        for number, bucket in enumerate(self._plan.buckets):
            for link in (*bucket.links, *bucket.forwards):
                yield Hop(number, link)

    def _check_forwards(self) -> None:
        """Check the links from destinations: the elements must come from the same bucket or from an earlier one."""
        received: dict[int, list[Place]] = {
            link.source: []
            for bucket in self._plan.buckets
            for link in bucket.links
            if link.source >= self._plan.num_sources
        }
        arrived: set[tuple[int, int]] = set()
        for number, link in self._plan.order or self._hops():
            bucket = self._plan.buckets[number]
            if link.source in received and link in bucket.links:
                for move in bucket.moves:
                    self._check_received(link, move, received[link.source])
            elif link.source >= self._plan.num_sources and (number, link.source) not in arrived:
                raise PlanError(f"{self._plan.holders[link.source]} forwards elements that it has not received: {link}")
            arrived.add((number, link.destination))
            if link.destination in received:
                received[link.destination] += (move.destination for move in bucket.moves)

    def _check_received(self, link: Link, move: Move, received: Iterable[Place]) -> None:
        parameter, rectangle = move.source
        common = [intersect(place.rectangle, rectangle) for place in received if place.parameter == parameter]
        # No element is written twice, so the intersections are disjoint.
        if sum(num_elements(part) for part in common if part is not None) != num_elements(rectangle):
            raise PlanError(f"{self._plan.holders[link.source]} forwards elements that it has not received: {move}")


class _Parameters:
    """Maps places in a shard's parameters to canonical coordinates."""

    def __init__(self, shard: Shard):
        self._pieces = {name: sorted(pieces, key=_start) for name, pieces in shard.by_parameter().items()}

    def canonical(self, place: Place) -> tuple[str, Rectangle] | None:
        """Return the canonical coordinates of a place, or None for padding and for elements that no piece covers."""
        piece = self._piece(place)
        if piece is None or piece.canonical is None:
            return None
        return piece.canonical, piece.to_canonical(place.rectangle)

    def is_padding(self, place: Place) -> bool:
        piece = self._piece(place)
        return piece is not None and piece.canonical is None

    def _piece(self, place: Place) -> Piece | None:
        pieces = self._pieces.get(place.parameter, [])
        start = tuple(low for low, _ in place.rectangle)
        # Try the last piece that starts at or before the place first: it contains the place if the pieces are
        # consecutive along one axis, as they usually are.
        near = bisect_right(pieces, start, key=_start)
        for piece in chain(pieces[max(0, near - 1) : near], pieces):
            if contains(piece.local_rectangle, place.rectangle):
                return piece
        return None


def _start(piece: Piece) -> tuple[int, ...]:
    return tuple(low for low, _ in piece.local_rectangle)


def _check_tiling(name: str, shard: Shard, places: Iterable[Place]) -> None:
    written = defaultdict(list)
    for parameter, rectangle in places:
        written[parameter].append(rectangle)
    for parameter, shape in shard.shapes.items():
        rectangles = written[parameter]
        outside = [rectangle for rectangle in rectangles if not contains(whole(shape), rectangle)]
        if outside:
            raise PlanError(f"{name} {parameter} {shape}: {outside[0]} is outside the parameter")
        overlap = _overlap(rectangles)
        if overlap:
            raise PlanError(f"{name} {parameter}: {overlap} is written twice")
        missing = num_elements(whole(shape)) - sum(map(num_elements, rectangles))
        if missing:
            raise PlanError(f"{name} {parameter} {shape}: {missing} elements are never written")


def _overlap(rectangles: Sequence[Rectangle], axis: int = 0) -> Rectangle | None:
    """Return the intersection of two of the rectangles, or None if all are disjoint.

    Does not compare all pairs: axis by axis, only rectangles whose spans overlap are compared.
    """
    if len(rectangles) < 2:
        return None
    if axis == len(rectangles[0]):
        return next((common for pair in combinations(rectangles, 2) if (common := intersect(*pair))), None)
    return next((common for run in _runs(rectangles, axis) if (common := _overlap(run, axis + 1))), None)


def _runs(rectangles: Sequence[Rectangle], axis: int) -> list[list[Rectangle]]:
    """Partition the rectangles into runs. Rectangles in different runs do not overlap along the axis."""
    runs: list[list[Rectangle]] = []
    end = 0
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle[axis]):
        start, stop = rectangle[axis]
        if not runs or start >= end:
            runs.append([])
        runs[-1].append(rectangle)
        end = max(end, stop)
    return runs
