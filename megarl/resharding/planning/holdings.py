"""Who holds what: an index of holders by canonical tensor and rectangle, and how rectangles divide among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megarl.resharding.piece import (
    Holder,
    Place,
    Rectangle,
    Shard,
    contains,
    intersect,
    moved,
    subtract,
)


class Kept(NamedTuple):
    """A canonical rectangle as some holders keep it, all at the same place."""

    canonical: Rectangle
    place: Place
    dtype: str
    holders: tuple[int, ...]

    def part(self, rectangle: Rectangle) -> Place:
        """Where a part of the canonical rectangle lies."""
        return Place(self.place.parameter, moved(rectangle, self.canonical, self.place.rectangle))


Holdings = dict[str, dict[Rectangle, list[Kept]]]
"""Canonical tensor -> each of its rectangles that somebody keeps as one piece -> by whom and where."""


def shards_of(holders: Sequence[Holder], first: int = 0) -> dict[Shard, tuple[int, ...]]:
    """Each shard with the numbers of its holders, which are counted from `first`."""
    numbers: dict[Shard, list[int]] = defaultdict(list)
    for number, holder in enumerate(holders, start=first):
        numbers[holder.shard].append(number)
    return {shard: tuple(members) for shard, members in numbers.items()}


def holdings(holders: Sequence[Holder], first: int = 0) -> Holdings:
    """The holders' numbers are counted from `first`."""
    shards = shards_of(holders, first)
    members = list(shards.values())
    keepers: dict[str, dict[Rectangle, dict[tuple[Place, str], list[int]]]] = {}
    for number, shard in enumerate(shards):
        for piece in shard.pieces:
            if piece.canonical is not None:
                places = keepers.setdefault(piece.canonical, {}).setdefault(piece.canonical_rectangle, {})
                key = Place(piece.local, piece.local_rectangle), shard.dtypes[piece.local]
                places.setdefault(key, []).append(number)
    together: dict[tuple[int, ...], tuple[int, ...]] = {}

    def holders_of(numbers: list[int]) -> tuple[int, ...]:
        key = tuple(numbers)
        if key not in together:
            together[key] = tuple(sorted(holder for number in key for holder in members[number]))
        return together[key]

    return {
        tensor: {
            rectangle: [Kept(rectangle, *key, holders_of(numbers)) for key, numbers in places.items()]
            for rectangle, places in rectangles.items()
        }
        for tensor, rectangles in keepers.items()
    }


@dataclass(frozen=True, slots=True)
class Division:
    """What of a wanted rectangle its sources have: parts, each as large as one source can give, and for each the
    numbers of the rectangles that contain it."""

    parts: tuple[tuple[Rectangle, tuple[int, ...]], ...]
    missing: Rectangle | None


@lru_cache(maxsize=4096)  # layers, experts and replicas are cut alike
def divide(held: tuple[Rectangle, ...], wanted: Rectangle) -> Division:
    """held: what sources keep of the same tensor, each as one piece."""
    overlapping = [(i, rectangle) for i, rectangle in enumerate(held) if intersect(rectangle, wanted)]
    parts, missing = [], [wanted]
    for _, rectangle in overlapping:
        left = []
        for part in missing:
            common = intersect(rectangle, part)
            if common is None:
                left.append(part)
            else:
                parts.append((common, tuple(i for i, other in overlapping if contains(other, common))))
                left += subtract(part, common)
        missing = left
    return Division(tuple(parts), missing[0] if missing else None)
