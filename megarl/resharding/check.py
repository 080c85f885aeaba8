"""Proves of a plan, whoever made it, that it writes every element of its destinations exactly once, and rightly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from megarl.resharding.piece import (
    Holder,
    Piece,
    Rectangle,
    contains,
    intersect,
    num_elements,
    whole,
)
from megarl.resharding.plan import Copy, Fill, Plan

PiecesByParameter = Mapping[str, Sequence[Piece]]


class PlanError(ValueError):
    """The plan would leave an element unwritten, write one twice, or write the wrong one."""


def check_plan(plan: Plan, sources: Sequence[Holder], destinations: Sequence[Holder]) -> None:
    """Raises PlanError unless

    - copies and fills tile every parameter of every destination: each element is written exactly once,
    - they write nothing else: nothing moves that the destination does not keep,
    - each copy has the same canonical coordinates at its source and at its destination; fills have none.
    """
    source_pieces = {holder.name: _by_parameter(holder) for holder in sources}
    names = {holder.name for holder in destinations}
    for entry in (*plan.copies, *plan.fills):
        if entry.destination not in names:
            raise PlanError(f"{entry.destination} is not a destination: {entry}")
    for destination in destinations:
        part = plan.for_destination(destination.name)
        pieces = _by_parameter(destination)
        for copy in part.copies:
            _check_copy(copy, source_pieces.get(copy.source, {}), pieces)
        for fill in part.fills:
            _check_fill(fill, pieces)
        _check_coverage(destination, (*part.copies, *part.fills))


def _by_parameter(holder: Holder) -> PiecesByParameter:
    pieces = defaultdict(list)
    for piece in holder.pieces:
        pieces[piece.local].append(piece)
    return pieces


def _check_copy(copy: Copy, source: PiecesByParameter, destination: PiecesByParameter) -> None:
    there = _canonical(source.get(copy.source_parameter, ()), copy.source_rectangle)
    here = _canonical(destination.get(copy.destination_parameter, ()), copy.destination_rectangle)
    if there is None:
        raise PlanError(f"its source does not hold what is copied: {copy}")
    if here is None:
        raise PlanError(f"its destination does not keep what is copied: {copy}")
    if there != here:
        raise PlanError(f"{there} at the source, {here} at the destination: {copy}")


def _check_fill(fill: Fill, destination: PiecesByParameter) -> None:
    pieces = destination.get(fill.destination_parameter, ())
    if not any(p.canonical is None and contains(p.local_rectangle, fill.destination_rectangle) for p in pieces):
        raise PlanError(f"fills elements that are not padding: {fill}")


def _canonical(pieces: Iterable[Piece], rectangle: Rectangle) -> tuple[str, Rectangle] | None:
    """The canonical coordinates of a rectangle of a local parameter; None for padding and for what is not held."""
    for piece in pieces:
        if piece.canonical is not None and contains(piece.local_rectangle, rectangle):
            return piece.canonical, piece.to_canonical(rectangle)
    return None


def _check_coverage(destination: Holder, entries: Iterable[Copy | Fill]) -> None:
    written = defaultdict(list)
    for entry in entries:
        written[entry.destination_parameter].append(entry.destination_rectangle)
    for parameter, shape in destination.shapes.items():
        rectangles = written[parameter]
        outside = [rectangle for rectangle in rectangles if not contains(whole(shape), rectangle)]
        if outside:
            raise PlanError(f"{destination.name} {parameter} {shape}: written outside, at {outside[0]}")
        overlap = _overlap(rectangles)
        if overlap:
            raise PlanError(f"{destination.name} {parameter}: written twice, at {overlap}")
        missing = num_elements(whole(shape)) - sum(num_elements(rectangle) for rectangle in rectangles)
        if missing:
            raise PlanError(f"{destination.name} {parameter} {shape}: {missing} elements are never written")


def _overlap(rectangles: Sequence[Rectangle], axis: int = 0) -> Rectangle | None:
    """A rectangle that two of them share. Axis by axis, only those whose spans touch are compared: no pair by pair."""
    if len(rectangles) < 2:
        return None
    if axis == len(rectangles[0]):
        return next((common for pair in combinations(rectangles, 2) if (common := intersect(*pair))), None)
    return next((common for group in _runs(rectangles, axis) if (common := _overlap(group, axis + 1))), None)


def _runs(rectangles: Sequence[Rectangle], axis: int) -> list[list[Rectangle]]:
    """Groups whose spans along the axis do not overlap those of any other group."""
    runs: list[list[Rectangle]] = []
    end = 0
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle[axis]):
        start, stop = rectangle[axis]
        if not runs or start >= end:
            runs.append([])
        runs[-1].append(rectangle)
        end = max(end, stop)
    return runs
