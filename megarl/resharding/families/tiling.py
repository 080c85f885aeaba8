"""The ways in which a local parameter is put together from canonical tensors.

A tiling names canonical tensors and says which spans of one axis of them tensor-parallel rank `rank` of `tp` holds, in
order. The other axes are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from megarl.models.shape import ModelShape


class Block(NamedTuple):
    """The span start <= index < stop of the tiling's tensor number `tensor`; None: so many zeros, without a
    counterpart."""

    tensor: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The way in which a local parameter is put together.

    tensors  canonical names, relative to the layer within a layer
    axis     the axis that is cut
    along    the axis on which the pieces follow each other (None: the same)
    """

    tensors: tuple[str, ...]
    axis: int = 0
    along: int | None = None

    def of_experts(self, numbers: Iterable[int]) -> Self:
        """Returns the tiling with the tensors of each of these experts; {} in their names is its number."""
        return replace(self, tensors=tuple(name.format(number) for number in numbers for name in self.tensors))

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        """Returns the blocks of a rank, in order. sizes: that of each tensor along the axis."""
        raise NotImplementedError


class Whole(Tiling):
    """The tensor itself, on every rank."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        return [Block(i, 0, size) for i, size in enumerate(sizes)]


@dataclass(frozen=True, slots=True)
class Split(Tiling):
    """The rank's share of each tensor, one after the other: [gate_r; up_r].

    padded   the size to which zeros behind it fill up each share (None: its own)
    """

    padded: int | None = None

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        shares = [_share(i, size, tp, rank) for i, size in enumerate(sizes)]
        return [block for share in shares for block in (share, *self._padding(share.stop - share.start))]

    def _padding(self, size: int) -> list[Block]:
        return [Block(None, size, self.padded)] if self.padded is not None and self.padded > size else []


class Grouped(Tiling):
    """Queries, keys and values interleaved by KV group, as in Megatron: for each group its query heads, key, value."""

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        groups = _share(0, model.kv_heads, tp, rank)
        return [
            _share(i, size, model.kv_heads, group)
            for group in range(groups.start, groups.stop)
            for i, size in enumerate(sizes)
        ]


class Heads(Tiling):
    """Query, key and value heads in three runs, as in vLLM; a KV head is on several ranks when there are fewer."""

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
    """The rank's share of one tensor that is padded with zeros to `padded` rows."""

    padded: int = 0

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        [size] = sizes
        _, start, stop = _share(0, self.padded, tp, rank)
        rows = Block(0, min(start, size), min(stop, size))
        padding = Block(None, max(start, size), max(stop, size))
        return [block for block in (rows, padding) if block.start < block.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused(Tiling):
    """The blocks that `tiling` makes of the parts of one tensor, which follow each other, each taken as a tensor.

    parts     rows of each, as names of ModelShape's attributes
    """

    tiling: Tiling
    parts: tuple[str, ...]

    def blocks(self, sizes: Sequence[int], model: ModelShape, tp: int, rank: int) -> list[Block]:
        rows = [getattr(model, part) for part in self.parts]
        starts = list(accumulate(rows, initial=0))
        parts = self.tiling.blocks(rows, model, tp, rank)
        return [Block(0, starts[part] + start, starts[part] + stop) for part, start, stop in parts]


def _share(tensor: int, size: int, parts: int, part: int) -> Block:
    assert size % parts == 0, f"{size} does not divide by {parts}"
    each = size // parts
    return Block(tensor, part * each, (part + 1) * each)
