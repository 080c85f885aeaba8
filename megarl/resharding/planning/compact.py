"""Encode a plan as a few arrays, which are cheap to send. Each process decodes only its own part.

Pickling the objects of a large plan is slow: its moves contain a million repeated names and rectangles.

Plans are not cached on disk. Planning DeepSeek-V3 from 512 to 256 ranks takes 13 s of a startup of several minutes, and
a cache lookup would take 6 s to describe and hash all holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from megarl.core.collector import without_collector
from megarl.resharding.piece import Place, Rectangle
from megarl.resharding.planning.plan import Bucket, Hop, Link, Move, Padding, Plan


@dataclass(frozen=True, eq=False, slots=True)
class CompactPlan:
    """A plan encoded as integer arrays with one row per item.

    Attributes:
        bare: the plan without its buckets and order.
        buckets: [B, 2]  size of the bucket in bytes, cumulative number of moves.
        links: [L, 4]  bucket, 1 if forwarding, source, destination; sorted by bucket.
        moves: [M, 6]  source parameter, source rectangle, destination parameter, destination rectangle, source dtype,
            destination dtype, as indices into `names` and `rectangles`; sorted by bucket.
        names, rectangles: distinct names of parameters and dtypes, and distinct rectangles.
        order: [H, 3]  bucket, source, destination.
    """

    bare: Plan
    buckets: np.ndarray
    links: np.ndarray
    moves: np.ndarray
    names: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]
    order: np.ndarray

    @classmethod
    @without_collector()
    def of(cls, plan: Plan) -> CompactPlan:
        names: dict[str, int] = {}
        rectangles: dict[Rectangle, int] = {}
        moves = (
            index
            for bucket in plan.buckets
            for (source, source_rectangle), (destination, rectangle), source_dtype, dtype in bucket.moves
            for index in (
                names.setdefault(source, len(names)),
                rectangles.setdefault(source_rectangle, len(rectangles)),
                names.setdefault(destination, len(names)),
                rectangles.setdefault(rectangle, len(rectangles)),
                names.setdefault(source_dtype, len(names)),
                names.setdefault(dtype, len(names)),
            )
        )
        links = (
            (number, is_forward, *link)
            for number, bucket in enumerate(plan.buckets)
            for is_forward, links in enumerate((bucket.links, bucket.forwards))
            for link in links
        )
        ends = accumulate(len(bucket.moves) for bucket in plan.buckets)
        return cls(
            bare=replace(plan, buckets=(), order=()),
            buckets=_rows(zip((bucket.num_bytes for bucket in plan.buckets), ends, strict=True), 2, np.int64),
            links=_rows(links, 4),
            moves=np.fromiter(moves, np.int32).reshape(-1, 6),
            names=tuple(names),
            rectangles=tuple(rectangles),
            order=_rows(((number, *link) for number, link in plan.order), 3),
        )

    def part(self, names: Collection[str]) -> Plan:
        """Decode the links that start or end at these holders. The returned plan still lists all holders."""
        members = [number for number, name in enumerate(self.bare.holders) if name in names]
        links = self.links[np.isin(self.links[:, 2:], members).any(axis=1)]
        hops = self.order[np.isin(self.order[:, 1:], members).any(axis=1)]
        numbers, starts = np.unique(links[:, 0], return_index=True)
        runs = pairwise((*starts, len(links)))
        order = np.column_stack((np.searchsorted(numbers, hops[:, 0]), hops[:, 1:])).tolist()
        paddings = (Padding(tuple(h for h in holders if h in members), places) for holders, places in self.bare.padding)
        return replace(
            self.bare,
            buckets=tuple(self._bucket(number, links[i:j]) for number, (i, j) in zip(numbers, runs, strict=True)),
            padding=tuple(padding for padding in paddings if padding.holders),
            order=tuple(Hop(bucket, Link(*ends)) for bucket, *ends in order),
        )

    def _bucket(self, number: int, links: np.ndarray) -> Bucket:
        num_bytes, end = self.buckets[number].tolist()
        start = self.buckets[number - 1, 1] if number else 0
        kinds = (links[links[:, 1] == is_forward, 2:].tolist() for is_forward in (False, True))
        sent, forwarded = (tuple(Link(*ends) for ends in kind) for kind in kinds)
        return Bucket(sent, forwarded, tuple(self._move(*row) for row in self.moves[start:end].tolist()), num_bytes)

    def _move(
        self, source: int, source_rectangle: int, destination: int, rectangle: int, source_dtype: int, dtype: int
    ) -> Move:
        names, rectangles = self.names, self.rectangles
        places = Place(names[source], rectangles[source_rectangle]), Place(names[destination], rectangles[rectangle])
        return Move(*places, names[source_dtype], names[dtype])


def _rows(rows: Iterable[tuple[int, ...]], width: int, dtype: type = np.int32) -> np.ndarray:
    """Return the rows as an array [num_rows, width], even if there are no rows."""
    return np.array([*rows], dtype).reshape(-1, width)
