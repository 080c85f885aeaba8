"""The plan: which rectangle of which parameter goes where. Pure data, the same on every process that computes it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megarl.resharding.piece import Holder, Piece, Rectangle, contains, intersect, num_elements, subtract


@dataclass(frozen=True, slots=True)
class Copy:
    """The elements of a rectangle of a source's parameter become those of a rectangle of the same shape."""

    source: str
    source_parameter: str
    source_rectangle: Rectangle
    destination: str
    destination_parameter: str
    destination_rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class Fill:
    """These elements become zero: they have no counterpart in the checkpoint."""

    destination: str
    destination_parameter: str
    destination_rectangle: Rectangle


@dataclass(frozen=True)
class Plan:
    """In the order of the destinations and of their pieces."""

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]

    @cached_property
    def plan_hash(self) -> str:
        """SHA-256 of the contents: equal on processes that have the same plan."""
        digest = hashlib.sha256()
        for entry in (*self.copies, *self.fills):
            digest.update(repr(entry).encode())
        return digest.hexdigest()

    def for_destination(self, name: str) -> Plan:
        """The part that writes into one holder."""
        return self._by_destination.get(name, Plan((), ()))

    def bytes_by_link(self, bytes_per_element: int) -> dict[tuple[str, str], int]:
        """(source, destination) -> bytes that move between them."""
        links: dict[tuple[str, str], int] = defaultdict(int)
        for copy in self.copies:
            size = num_elements(copy.destination_rectangle)
            links[copy.source, copy.destination] += size * bytes_per_element
        return dict(links)

    def grouped_by(self, key: Callable[[Copy | Fill], str]) -> dict[str, Plan]:
        """The plan in parts, by what `key` says of each copy and fill."""
        copies, fills = defaultdict(list), defaultdict(list)
        for copy in self.copies:
            copies[key(copy)].append(copy)
        for fill in self.fills:
            fills[key(fill)].append(fill)
        return {name: Plan(tuple(copies[name]), tuple(fills[name])) for name in dict.fromkeys((*copies, *fills))}

    @cached_property
    def _by_destination(self) -> dict[str, Plan]:
        return self.grouped_by(lambda entry: entry.destination)


class Candidate(NamedTuple):
    """A source, by its place among the sources, and the piece of it that holds what is wanted."""

    source: int
    piece: Piece


Part = tuple[Rectangle, list[Candidate]]
"""A canonical rectangle, and everybody who holds all of it."""


def make_plan(sources: Sequence[Holder], destinations: Sequence[Holder]) -> Plan:
    """Every element of every destination from exactly one source.

    Where several sources hold the same elements (data-parallel replicas, replicated norms, copies of tied weights),
    each copy is taken from the one that has given the fewest elements so far, the first of them on a tie.
    Raises ValueError for an element that no source holds.
    """
    chooser = _Chooser(sources)
    copies, fills = [], []
    for destination in destinations:
        for piece in destination.pieces:
            if piece.canonical is None:
                fills.append(Fill(destination.name, piece.local, piece.local_rectangle))
            else:
                copies += chooser.copies(destination.name, piece)
    return Plan(tuple(copies), tuple(fills))


class _Chooser:
    """Finds who holds what, and spreads the load."""

    def __init__(self, sources: Sequence[Holder]):
        self._names = [source.name for source in sources]
        self._load = [0] * len(sources)
        self._holders: dict[str, dict[Rectangle, list[Candidate]]] = defaultdict(lambda: defaultdict(list))
        for i, source in enumerate(sources):
            for piece in source.pieces:
                if piece.canonical is not None:
                    self._holders[piece.canonical][piece.canonical_rectangle].append(Candidate(i, piece))
        # Replicated destinations want the same rectangles.
        self._divided: dict[tuple[str, Rectangle], list[Part]] = {}

    def copies(self, destination: str, wanted: Piece) -> list[Copy]:
        key = wanted.canonical, wanted.canonical_rectangle
        if key not in self._divided:
            self._divided[key] = self._divide(*key)
        copies = []
        for rectangle, candidates in self._divided[key]:
            chosen = min(candidates, key=lambda candidate: self._load[candidate.source])
            self._load[chosen.source] += num_elements(rectangle)
            copies.append(
                Copy(
                    source=self._names[chosen.source],
                    source_parameter=chosen.piece.local,
                    source_rectangle=chosen.piece.to_local(rectangle),
                    destination=destination,
                    destination_parameter=wanted.local,
                    destination_rectangle=wanted.to_local(rectangle),
                )
            )
        return copies

    def _divide(self, canonical: str, wanted: Rectangle) -> list[Part]:
        """Disjoint parts of the wanted rectangle, each as large as one source can give."""
        overlapping = {
            rectangle: candidates
            for rectangle, candidates in self._holders.get(canonical, {}).items()
            if intersect(rectangle, wanted)
        }
        parts, missing = [], [wanted]
        for rectangle in overlapping:
            left = []
            for part in missing:
                common = intersect(rectangle, part)
                if common is None:
                    left.append(part)
                else:
                    parts.append((common, _holding(common, overlapping)))
                    left += subtract(part, common)
            missing = left
        if missing:
            raise ValueError(f"{canonical}: no source holds the elements {_range(missing[0])}")
        return parts


def _holding(wanted: Rectangle, holders: dict[Rectangle, list[Candidate]]) -> list[Candidate]:
    """In the order of the sources."""
    lists = [candidates for rectangle, candidates in holders.items() if contains(rectangle, wanted)]
    return sorted((candidate for candidates in lists for candidate in candidates), key=lambda c: c.source)


def _range(rectangle: Rectangle) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in rectangle) + "]"
