"""Tilings describe how a local parameter is composed of canonical tensors.

A tiling lists canonical tensors and the spans along one axis that tensor-parallel rank `rank` of `tp` holds, in order.
The other axes are not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from megarl.models.shape import ModelShape


class Block(NamedTuple):
    """The span start <= index < stop in the tiling's tensor with index `tensor` (None: zero padding of this length)."""

    tensor: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Describes which canonical tensors form a local parameter.

    Attributes:
        tensors: canonical names; in a layer, relative to its prefix.
        axis: the axis that is split.
        along: the axis along which the blocks are concatenated (None: `axis`).
    """

    tensors: tuple[str, ...]
    axis: int = 0
    along: int | None = None

    def for_experts(self, numbers: Iterable[int]) -> Self:
        """Return the tiling with the tensors repeated for each expert; {} in their names becomes the expert's index."""
        return replace(self, tensors=tuple(name.format(number) for number in numbers for name in self.tensors))

    def padded_to(self, size: int | None) -> Tiling:
        """Return the tiling for a worker that pads its share of the experts' intermediate size to `size` (None: no
        padding)."""
        return self

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        """Return the blocks that a rank holds, in order. `sizes` contains the size of each tensor along `axis`."""
        raise NotImplementedError


class Whole(Tiling):
    """The complete tensors, replicated on every rank."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        return [Block(i, 0, size) for i, size in enumerate(sizes)]


class OnFirstRank(Tiling):
    """The complete tensors on the first rank, and zeros on the others, as for a bias that is added before a sum over
    ranks."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        return [Block(i if rank == 0 else None, 0, size) for i, size in enumerate(sizes)]


@dataclass(frozen=True, slots=True)
class Split(Tiling):
    """The rank's share of each tensor, concatenated, for example [gate_r; up_r]. Each share is zero-padded to the size
    `padded` (None: no padding)."""

    padded: int | None = None

    def padded_to(self, size: int | None) -> Tiling:
        return replace(self, padded=size)

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        shares = [_share(i, size, tp, rank) for i, size in enumerate(sizes)]
        return [block for share in shares for block in (share, *self._padding(share.stop - share.start))]

    def _padding(self, size: int) -> list[Block]:
        return [Block(None, size, self.padded)] if self.padded is not None and self.padded > size else []


class Grouped(Tiling):
    """Query, key and value heads interleaved by KV head, as in Megatron: the query heads of a KV head, its key, its
    value, then the next KV head."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        kv_heads = _share(0, model.kv_heads, tp, rank)
        return [
            _share(i, size, model.kv_heads, kv_head)
            for kv_head in range(kv_heads.start, kv_heads.stop)
            for i, size in enumerate(sizes)
        ]


class Heads(Tiling):
    """All query heads, all key heads, then all value heads, as in vLLM. KV heads are replicated if kv_heads < tp."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        queries, *keys_values = sizes
        kv_ranks = min(tp, model.kv_heads)
        kv_rank = rank * kv_ranks // tp
        return [
            _share(0, queries, tp, rank),
            *(_share(i, size, kv_ranks, kv_rank) for i, size in enumerate(keys_values, start=1)),
        ]


@dataclass(frozen=True, slots=True)
class Padded(Tiling):
    """The rank's share of one tensor, which is zero-padded to `padded` rows before it is split."""

    padded: int = 0

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        [size] = sizes
        _, start, stop = _share(0, self.padded, tp, rank)
        rows = Block(0, min(start, size), min(stop, size))
        padding = Block(None, max(start, size), max(stop, size))
        return [block for block in (rows, padding) if block.start < block.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused(Tiling):
    """Applies `tiling` to the consecutive parts of fused tensors, as if each part were a separate tensor. `parts`
    contains the number of rows in each part of each tensor, as names of ModelShape attributes."""

    tiling: Tiling
    parts: tuple[tuple[str, ...], ...]

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        rows = [[attrgetter(part)(model) for part in parts] for parts in self.parts]
        places = [
            (tensor, start)
            for tensor, sides in enumerate(rows)
            for start in list(accumulate(sides, initial=0))[: len(sides)]
        ]
        parts = self.tiling.blocks([size for sides in rows for size in sides], model, tp, rank)
        return [
            Block(None, start, stop)
            if part is None
            else Block(places[part][0], places[part][1] + start, places[part][1] + stop)
            for part, start, stop in parts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungrouped(Tiling):
    """The rank's share of tensors whose rows are grouped by head, rearranged by part: a part's rows for all heads, then
    the next part.

    Attributes:
        heads: number of heads, as the name of a ModelShape attribute.
        parts: number of rows per head in each part of each tensor, as names of ModelShape attributes.
    """

    heads: str
    parts: tuple[tuple[str, ...], ...]

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        _, first, last = _share(0, attrgetter(self.heads)(model), tp, rank)
        blocks = []
        for tensor, parts in enumerate(self.parts):
            starts = list(accumulate((attrgetter(part)(model) for part in parts), initial=0))
            each = starts[-1]
            for start, stop in pairwise(starts):
                blocks += [Block(tensor, head * each + start, head * each + stop) for head in range(first, last)]
        return blocks


class GatedGroups(Tiling):
    """Queries, output gates, keys and values by KV head, as in Megatron: the queries of a KV head, their gates, the
    key, the value, then the next KV head. In the first tensor, each query head's query is followed by its gate."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        _, first, last = _share(0, model.kv_heads, tp, rank)
        dim, queries, blocks = model.head_dim, model.heads // model.kv_heads, []
        for kv_head in range(first, last):
            heads = range(kv_head * queries, (kv_head + 1) * queries)
            blocks += [Block(0, (2 * h + part) * dim, (2 * h + part + 1) * dim) for part in range(2) for h in heads]
            blocks += [Block(tensor, kv_head * dim, (kv_head + 1) * dim) for tensor in (1, 2)]
        return blocks


def _share(tensor: int, size: int, parts: int, part: int) -> Block:
    assert size % parts == 0, f"{size} is not divisible by {parts}"
    each = size // parts
    return Block(tensor, part * each, (part + 1) * each)
