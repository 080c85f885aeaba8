"""Map rectangles in canonical tensors to rectangles in local parameters.

Canonical tensors are the tensors of the Hugging Face checkpoint, with the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Supported weight dtypes and their element size in bytes."""

Rectangle = tuple[tuple[int, int], ...]
"""A half-open interval (start, stop) for each dimension."""


def whole(shape: tuple[int, ...]) -> Rectangle:
    """Return the rectangle that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def span(shape: tuple[int, ...], axis: int, start: int, stop: int) -> Rectangle:
    """Return the rectangle with start <= index < stop along one axis and the full range of all other axes."""
    return tuple((start, stop) if i == axis else (0, size) for i, size in enumerate(shape))


def flat_span(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """Return the rectangles that cover elements start <= index < stop of a flattened tensor, in order.

    A matrix needs at most three rectangles: the end of a row, complete rows, and the start of a row.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    row, parts = prod(shape[1:]), []
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # the range is within one row
        return _in_row(shape, last, start, stop)
    parts += _in_row(shape, first - 1, start, first * row)
    if first < last:
        parts.append(span(shape, 0, first, last))
    return parts + _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Rectangle]:
    before = index * prod(shape[1:])
    return [((index, index + 1), *rest) for rest in flat_span(shape[1:], start - before, stop - before)]


def shape_of(rectangle: Rectangle) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in rectangle)


def num_elements(rectangle: Rectangle) -> int:
    return prod(shape_of(rectangle))


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * ITEM_BYTES[dtype]


def contains(outer: Rectangle, inner: Rectangle) -> bool:
    return len(outer) == len(inner) and all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """Return the intersection of two rectangles, or None if it is empty."""
    assert len(a) == len(b), f"rectangles of different rank: {a}, {b}"
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def cut(rectangle: Rectangle, parts: int) -> list[Rectangle]:
    """Split a rectangle into at most `parts` slabs whose sizes differ by at most one row.

    The split axis is the first with at least `parts` indices or, if there is none, the longest.
    """
    sizes = shape_of(rectangle)
    axis = next((i for i, size in enumerate(sizes) if size >= parts), max(range(len(sizes)), key=sizes.__getitem__))
    start, size = rectangle[axis][0], sizes[axis]
    parts = min(parts, size)
    bounds = [start + size * i // parts for i in range(parts + 1)]
    return [(*rectangle[:axis], (low, high), *rectangle[axis + 1 :]) for low, high in pairwise(bounds)]


def subtract(a: Rectangle, inner: Rectangle) -> list[Rectangle]:
    """Return disjoint rectangles that cover `a` without `inner`; `a` must contain `inner`."""
    assert contains(a, inner), f"{a} does not contain {inner}"
    parts = []
    for axis, ((start, stop), (low, high)) in enumerate(zip(a, inner, strict=True)):
        # Earlier axes are already restricted to `inner`; later axes still have the full range of `a`.
        parts += [(*inner[:axis], side, *a[axis + 1 :]) for side in ((start, low), (high, stop)) if side[0] < side[1]]
    return parts


def moved(rectangle: Rectangle, origin: Rectangle, target: Rectangle) -> Rectangle:
    """Return the rectangle translated by the offset from the start of `origin` to the start of `target`."""
    return tuple(
        (start - o[0] + t[0], stop - o[0] + t[0]) for (start, stop), o, t in zip(rectangle, origin, target, strict=True)
    )


class Place(NamedTuple):
    """A rectangle in a local parameter."""

    parameter: str
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle in a canonical tensor and the rectangle in a local parameter that holds its elements.

    Both rectangles have the same shape and element order. `canonical` is None for padding, whose elements have no
    canonical counterpart and are zero.
    """

    canonical: str | None
    canonical_rectangle: Rectangle
    local: str
    local_rectangle: Rectangle

    def __post_init__(self) -> None:
        assert shape_of(self.canonical_rectangle) == shape_of(self.local_rectangle), f"shapes differ: {self}"

    def to_canonical(self, rectangle: Rectangle) -> Rectangle:
        """Convert a part of the local rectangle to the canonical rectangle whose elements it holds."""
        return moved(rectangle, self.local_rectangle, self.canonical_rectangle)


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """The layout of one holder's weights. Replicas share the object, so work per shard is done once.

    Attributes:
        shapes: local parameter name -> shape.
        pieces: pieces that tile every local parameter exactly, including its padding.
        dtypes: local parameter name -> dtype, such as "bfloat16".
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
    dtypes: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(shape, self.dtypes[name]) for name, shape in self.shapes.items())

    def mismatched_params(self, parameters: Mapping[str, tuple[tuple[int, ...], str]]) -> list[str]:
        """Compare a model's parameters (name -> shape and dtype) with this shard. Return one message per mismatch."""
        lines = []
        for name, (shape, dtype) in parameters.items():
            if name not in self.shapes:
                lines.append(f"{name} {list(shape)} ({dtype}) does not belong to the family")
            elif (shape, dtype) != (self.shapes[name], self.dtypes[name]):
                expected = f"{list(self.shapes[name])} ({self.dtypes[name]})"
                lines.append(f"{name} has shape {list(shape)} ({dtype}), but the family expects {expected}")
        return lines + [f"{name} is missing" for name in self.shapes if name not in parameters]

    @property
    def canonical_pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield (canonical tensor, piece) for all pieces except padding."""
        return ((piece.canonical, piece) for piece in self.pieces if piece.canonical is not None)

    def by_parameter(self) -> dict[str, list[Piece]]:
        """Return local parameter -> its pieces."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.local, []).append(piece)
        return pieces

    def zeroed(self, canonical: Container[str | None]) -> Shard:
        """Return a copy of the shard in which the elements from these canonical tensors are zero."""
        pieces = tuple(
            replace(piece, canonical=None) if piece.canonical in canonical else piece for piece in self.pieces
        )
        return replace(self, pieces=pieces)

    def only(self, names: Container[str], dtype: str) -> Shard:
        """Return a copy of the shard with only these parameters, in the given dtype."""
        shapes = {name: shape for name, shape in self.shapes.items() if name in names}
        pieces = tuple(piece for piece in self.pieces if piece.local in names)
        return Shard(shapes, pieces, dict.fromkeys(shapes, dtype))


@dataclass(frozen=True, slots=True)
class Holder:
    """A process or folder that holds weights.

    Attributes:
        name: unique among a plan's sources or among its destinations, e.g. "megatron:3", "vllm:0.1", "huggingface".
        node: index of its node; sources and destinations use the same numbering.
        device: index of its device if sources and destinations are colocated; a source and a destination on the same
            device have the same index. None: the holder does not share its device.
    """

    name: str
    shard: Shard
    node: int = 0
    device: int | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.shard.shapes

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.shard.pieces

    @property
    def dtypes(self) -> Mapping[str, str]:
        return self.shard.dtypes

    def zeroed(self, canonical: Container[str | None]) -> Holder:
        return replace(self, shard=self.shard.zeroed(canonical))
