"""Index holders by canonical tensor and rectangle, and divide wanted rectangles among the sources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from megarl.resharding.piece import Holder, Place, Rectangle, Shard, contains, intersect, moved, subtract


class Held(NamedTuple):
    """A canonical rectangle, and the holders that store it at the same place in their parameters."""

    canonical: Rectangle
    place: Place
    dtype: str
    holders: tuple[int, ...]

    def part(self, rectangle: Rectangle) -> Place:
        """Return the place of a part of the canonical rectangle."""
        return Place(self.place.parameter, moved(rectangle, self.canonical, self.place.rectangle))


Holdings = dict[str, dict[Rectangle, list[Held]]]
"""canonical tensor -> rectangle that holders store as one piece -> its places and their holders."""


def shards_of(holders: Sequence[Holder], first: int = 0) -> dict[Shard, tuple[int, ...]]:
    """Return shard -> indices of its holders. Holders are numbered from `first`."""
    numbers: dict[Shard, list[int]] = defaultdict(list)
    for number, holder in enumerate(holders, start=first):
        numbers[holder.shard].append(number)
    return {shard: tuple(members) for shard, members in numbers.items()}


def holdings(holders: Sequence[Holder], first: int = 0) -> Holdings:
    """Build the index for these holders. They are numbered from `first`."""
    shards = shards_of(holders, first)
    members = list(shards.values())
    shards_at: dict[str, dict[Rectangle, dict[tuple[Place, str], list[int]]]] = {}
    for number, shard in enumerate(shards):
        for tensor, piece in shard.canonical_pieces:
            places = shards_at.setdefault(tensor, {}).setdefault(piece.canonical_rectangle, {})
            key = Place(piece.local, piece.local_rectangle), shard.dtypes[piece.local]
            places.setdefault(key, []).append(number)

    @cache
    def merge_members(*numbers: int) -> tuple[int, ...]:
        return tuple(sorted(holder for number in numbers for holder in members[number]))

    return {
        tensor: {
            rectangle: [Held(rectangle, *key, merge_members(*numbers)) for key, numbers in places.items()]
            for rectangle, places in rectangles.items()
        }
        for tensor, rectangles in shards_at.items()
    }


@dataclass(frozen=True, slots=True)
class Division:
    """A division of a wanted rectangle among the sources. The parts are disjoint, and each can be sent by a single
    source. A part lists the indices of the held rectangles that contain it. `missing` is a part of the wanted rectangle
    that no source holds; None if the sources cover it."""

    parts: tuple[tuple[Rectangle, tuple[int, ...]], ...]
    missing: Rectangle | None


@lru_cache(maxsize=4096)  # layers, experts and replicas repeat the same divisions
def divide(held: tuple[Rectangle, ...], wanted: Rectangle) -> Division:
    """Divide a wanted rectangle among `held`, the rectangles in its tensor that sources store as single pieces."""
    overlapping = [(i, rectangle) for i, rectangle in enumerate(held) if intersect(rectangle, wanted)]
    parts, missing = [], [wanted]
    for _, rectangle in overlapping:
        remaining = []
        for part in missing:
            common = intersect(rectangle, part)
            if common is None:
                remaining.append(part)
            else:
                parts.append((common, tuple(i for i, other in overlapping if contains(other, common))))
                remaining += subtract(part, common)
        missing = remaining
    return Division(tuple(parts), missing[0] if missing else None)
