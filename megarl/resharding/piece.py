"""Pieces: how a holder of weights describes which part of which canonical tensor it has, and where.

Canonical space is the Hugging Face checkpoint: its tensor names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Rectangle = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


def shape_of(rectangle: Rectangle) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in rectangle)


def num_elements(rectangle: Rectangle) -> int:
    return prod(shape_of(rectangle))


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The common part, or None where there is none."""
    assert len(a) == len(b), f"rectangles of different rank: {a}, {b}"
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a canonical tensor and the rectangle of a local parameter that holds it; same shape, same order.

    canonical is None for a fill: local elements without a canonical counterpart (vocabulary padding), which are zero.
    """

    canonical: str | None
    canonical_rectangle: Rectangle
    local: str
    local_rectangle: Rectangle

    def __post_init__(self) -> None:
        assert shape_of(self.canonical_rectangle) == shape_of(self.local_rectangle), f"shapes differ: {self}"


@dataclass(frozen=True, slots=True)
class Holder:
    """One process (or folder) that holds weights.

    name      unique in a plan, e.g. "megatron:3", "vllm:0.1", "huggingface"
    shapes    local parameter name -> its shape
    pieces    tile every local parameter exactly, fills included
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
