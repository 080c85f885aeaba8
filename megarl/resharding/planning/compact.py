"""A plan as a few arrays: made once, sent to all, and every process takes out of it what concerns it.

As objects a large plan is slow to send: its moves are a million names and rectangles, few of them different.

No copy is kept on the disk for the next start. DeepSeek-V3 from 512 ranks into 256 is planned in 13 s, in a start that
takes minutes; to find out whether a copy is of the same holders, these would have to be described and hashed, 6 s.
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
    """A plan as arrays of integers, a row for each item.

    bare     the plan without what is in the arrays
    buckets  [B, 2]  bytes of the bucket, and how many moves there are up to its end
    links    [L, 4]  bucket, whether it is one of `forwards`, source, destination; by bucket, and there in order
    moves    [M, 6]  of each bucket in turn: source's parameter and rectangle, destination's, source's dtype,
                     destination's, by their places in `terms`
    terms    names of parameters, rectangles and dtypes, each once
    order    [H, 3]  bucket, source, destination
    """

    bare: Plan
    buckets: np.ndarray
    links: np.ndarray
    moves: np.ndarray
    terms: tuple[str | Rectangle, ...]
    order: np.ndarray

    @classmethod
    @without_collector()
    def of(cls, plan: Plan) -> CompactPlan:
        terms: dict[str | Rectangle, int] = {}
        moves = (
            terms.setdefault(term, len(terms))
            for bucket in plan.buckets
            for source, destination, *dtypes in bucket.moves
            for term in (*source, *destination, *dtypes)
        )
        links = (
            (number, forwards, *link)
            for number, bucket in enumerate(plan.buckets)
            for forwards, links in enumerate((bucket.links, bucket.forwards))
            for link in links
        )
        ends = accumulate(len(bucket.moves) for bucket in plan.buckets)
        return cls(
            bare=replace(plan, buckets=(), order=()),
            buckets=_rows(zip((bucket.num_bytes for bucket in plan.buckets), ends, strict=True), 2, np.int64),
            links=_rows(links, 4),
            moves=np.fromiter(moves, np.int32).reshape(-1, 6),
            terms=tuple(terms),
            order=_rows(((number, *link) for number, link in plan.order), 3),
        )

    def part(self, names: Collection[str]) -> Plan:
        """Returns the plan as far as it concerns these holders: all holders, but only the links of which they are an
        end."""
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
        kinds = (links[links[:, 1] == forwards, 2:].tolist() for forwards in (False, True))
        ways = (tuple(Link(*ends) for ends in kind) for kind in kinds)
        return Bucket(*ways, tuple(self._move(*row) for row in self.moves[start:end].tolist()), num_bytes)

    def _move(self, *numbers: int) -> Move:
        parameter, rectangle, new_parameter, new_rectangle, *dtypes = (self.terms[number] for number in numbers)
        return Move(Place(parameter, rectangle), Place(new_parameter, new_rectangle), *dtypes)


def _rows(rows: Iterable[tuple[int, ...]], width: int, dtype: type = np.int32) -> np.ndarray:
    """Returns the rows as an array [rows, width], also where there are none."""
    return np.array([*rows], dtype).reshape(-1, width)
