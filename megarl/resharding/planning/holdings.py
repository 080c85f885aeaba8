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
        """Returns the place of a part of the canonical rectangle."""
        return Place(self.place.parameter, moved(rectangle, self.canonical, self.place.rectangle))


Holdings = dict[str, dict[Rectangle, list[Kept]]]
"""The index: canonical tensor -> each of its rectangles that somebody keeps as one piece -> by whom and where."""


def shards_of(holders: Sequence[Holder], first: int = 0) -> dict[Shard, tuple[int, ...]]:
    """Returns each shard with the numbers of its holders, which are counted from `first`."""
    numbers: dict[Shard, list[int]] = defaultdict(list)
    for number, holder in enumerate(holders, start=first):
        numbers[holder.shard].append(number)
    return {shard: tuple(members) for shard, members in numbers.items()}


def holdings(holders: Sequence[Holder], first: int = 0) -> Holdings:
    """Returns the index of these holders, whose numbers are counted from `first`."""
    shards = shards_of(holders, first)
    members = list(shards.values())
    keepers: dict[str, dict[Rectangle, dict[tuple[Place, str], list[int]]]] = {}
    for number, shard in enumerate(shards):
        for piece in shard.pieces:
            if piece.canonical is not None:
                places = keepers.setdefault(piece.canonical, {}).setdefault(piece.canonical_rectangle, {})
                key = Place(piece.local, piece.local_rectangle), shard.dtypes[piece.local]
                places.setdefault(key, []).append(number)
    merged: dict[tuple[int, ...], tuple[int, ...]] = {}

    def merge_members(numbers: list[int]) -> tuple[int, ...]:
        key = tuple(numbers)
        if key not in merged:
            merged[key] = tuple(sorted(holder for number in key for holder in members[number]))
        return merged[key]

    return {
        tensor: {
            rectangle: [Kept(rectangle, *key, merge_members(numbers)) for key, numbers in places.items()]
            for rectangle, places in rectangles.items()
        }
        for tensor, rectangles in keepers.items()
    }


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of a wanted rectangle that its sources have, each as large as one source can give, and for each the
    numbers of the rectangles that contain it; and a part that none of them has, if there is one."""

    parts: tuple[tuple[Rectangle, tuple[int, ...]], ...]
    missing: Rectangle | None


@lru_cache(maxsize=4096)  # layers, experts and replicas are cut alike
def divide(held: tuple[Rectangle, ...], wanted: Rectangle) -> Division:
    """Divides a wanted rectangle among `held`, the rectangles of the same tensor that sources keep, each as one
    piece."""
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
