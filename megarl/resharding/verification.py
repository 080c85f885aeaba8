"""Compute checksums of weights per canonical region, independently on trainers and engines.

The checksum of a region is a sum over its elements: each rank sums its own part, and no weights are gathered. The
expected values are derived from the checkpoint layout and the export plan, not from the refit plan that they verify.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.resharding.piece import Holder, Rectangle, contains, intersect, moved
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.transport import view

CHUNK = 2**20
"""Number of elements to process at a time, which limits temporary memory."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Region(NamedTuple):
    """A rectangle in a canonical tensor, cast to one of the engines' dtypes."""

    tensor: str
    rectangle: Rectangle
    dtype: str

    def __str__(self) -> str:
        spans = ", ".join(f"{start}:{stop}" for start, stop in self.rectangle)
        return f"{self.tensor}[{spans}] ({self.dtype})"


@dataclass(frozen=True, slots=True)
class Checksum:
    """A sum modulo 2⁶⁴, and the holders and parameters that contribute to it."""

    value: int
    places: tuple[str, ...]

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum((self.value + other.value) % 2**64, (*self.places, *other.places))

    def __str__(self) -> str:
        return f"{self.value:016x} in {', '.join(self.places)}"


NOTHING = Checksum(0, ())


def regions(holders: Iterable[Holder]) -> list[Region]:
    """Return the distinct regions that the holders store."""
    shards = dict.fromkeys(holder.shard for holder in holders)
    stored = (
        Region(tensor, piece.canonical_rectangle, shard.dtypes[piece.local])
        for shard in shards
        for tensor, piece in shard.canonical_pieces
    )
    return list(dict.fromkeys(stored))


def sample(whole: Sequence[Region], num_regions: int, num_elements: int) -> list[Region]:
    """Choose at most num_regions regions deterministically, and shrink each to at most num_elements elements."""
    chosen = random.Random(0).sample(range(len(whole)), min(num_regions, len(whole)))
    return [region._replace(rectangle=_corner(region.rectangle, num_elements)) for region in (whole[i] for i in chosen)]


def _corner(rectangle: Rectangle, num_elements: int) -> Rectangle:
    """Return a leading corner of the rectangle with at most num_elements elements; it has complete rows if they fit."""
    spans: list[tuple[int, int]] = []
    for start, stop in reversed(rectangle):
        size = max(1, min(stop - start, num_elements))
        spans.append((start, start + size))
        num_elements //= size
    return tuple(reversed(spans))


@torch.no_grad()
def source_checksums(
    wanted: Sequence[Region], plan: Plan, member: str, parameters: Mapping[str, torch.Tensor]
) -> dict[Region, Checksum]:
    """Return one source's contribution to the checksums of the regions. `plan` exports to a Hugging Face folder, which
    assigns each element to exactly one source."""
    tensor_regions: dict[str, list[Region]] = defaultdict(list)
    for region in wanted:
        tensor_regions[region.tensor].append(region)
    checksums: dict[Region, Checksum] = {}
    for source, (tensor, rectangle), *_ in plan.moves_from(member):
        for region in tensor_regions[tensor]:
            common = intersect(region.rectangle, rectangle)
            if common is not None:
                values = view(parameters[source.parameter], moved(common, rectangle, source.rectangle))
                value = checksum(values.to(getattr(torch, region.dtype)), common)
                part = Checksum(value, (f"{member} {source.parameter}",))
                checksums[region] = checksums.get(region, NOTHING) + part
    return checksums


@torch.no_grad()
def check_weights(
    holder: Holder, parameters: Mapping[str, torch.Tensor], expected: Mapping[Region, Checksum]
) -> dict[int, int]:
    """Return the checksums of a destination's parameters, keyed by the region's position in `expected`. Raise a
    RuntimeError if any of them is wrong. Its message contains the first such region and both of its checksums."""
    checksums, wrong = _compare(holder, parameters, expected)
    if wrong:
        raise RuntimeError(
            f"engine and trainer weights differ in {len(wrong)} regions. The first is {wrong[0]}. Fix: check the "
            "installed versions with megarl doctor, then resume with resume=auto"
        )
    return checksums


@torch.no_grad()
def differing_regions(
    holder: Holder, parameters: Mapping[str, torch.Tensor], expected: Mapping[Region, Checksum]
) -> list[str]:
    """Return one message per expected region with a wrong checksum and per padded parameter with nonzero padding."""
    return _compare(holder, parameters, expected)[1]


def _compare(
    holder: Holder, parameters: Mapping[str, torch.Tensor], expected: Mapping[Region, Checksum]
) -> tuple[dict[int, int], list[str]]:
    """Return the checksums of the parameters, keyed by the region's position in `expected`, and one message per
    difference."""
    tensor_regions: dict[str, list[tuple[int, Region]]] = defaultdict(list)
    for position, region in enumerate(expected):
        tensor_regions[region.tensor].append((position, region))
    checksums: dict[int, int] = {}
    wrong: list[str] = []
    for piece in (piece for piece in holder.pieces if piece.local in parameters):
        values = view(parameters[piece.local], piece.local_rectangle)
        if piece.canonical is None:
            if values.count_nonzero():
                wrong.append(f"padding of {holder.name} {piece.local} is not zero")
            continue
        for position, region in tensor_regions[piece.canonical]:
            if region.dtype != holder.dtypes[piece.local] or not contains(piece.canonical_rectangle, region.rectangle):
                continue
            place = moved(region.rectangle, piece.canonical_rectangle, piece.local_rectangle)
            value = checksum(view(parameters[piece.local], place), region.rectangle)
            checksums[position] = value
            actual = Checksum(value, (f"{holder.name} {piece.local}",))
            if actual.value != expected[region].value:
                wrong.append(f"{region}: checksum {actual}, expected {expected[region]}")
    return checksums, wrong


def checksum(values: torch.Tensor, rectangle: Rectangle) -> int:
    """Return the checksum of the elements of a canonical rectangle.

    Checksums of disjoint rectangles add up modulo 2⁶⁴. Each element is hashed together with its position, so a
    changed or misplaced value changes the sum.
    """
    (start, _), *others = rectangle
    rows = max(1, CHUNK * len(values) // max(1, values.numel()))
    parts = (
        _sum(part, ((start + i * rows, start + i * rows + len(part)), *others))
        for i, part in enumerate(values.split(rows))
    )
    return sum(parts) % 2**64


def _sum(values: torch.Tensor, rectangle: Rectangle) -> int:
    """Return the sum of the hashed elements.

    int64 arithmetic wraps identically on every device. The multipliers are large odd constants, so each multiplication
    is a bijection.
    """
    place = torch.zeros((), dtype=torch.int64, device=values.device)
    for start, stop in rectangle:
        place = place.unsqueeze(-1) * -0x61C8864680B583EB + torch.arange(start, stop, device=values.device)
    mixed = place * -0x4B47D0C55A4D4B4D + values.contiguous().view(INTEGERS[values.itemsize])
    mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
    return int((mixed ^ (mixed >> 32)).sum())
