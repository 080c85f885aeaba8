"""Quantize weights to fp8 blocks as vLLM does.

Each trainer rank quantizes its own shard. If a shard boundary splits a block, an all-reduce over the ranks that share
the tensor ensures that they use the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from math import prod
from typing import Generic, TypeVar

import torch

from megarl.models.huggingface import FP8_BLOCK as BLOCK
from megarl.resharding.families.quantized import FP8, SCALES, blocks_of
from megarl.resharding.piece import Piece, Rectangle, Shard, shape_of
from megarl.resharding.transports.transport import view

LARGEST = torch.finfo(getattr(torch, FP8)).max
SMALLEST = 1e-4
"""Lower bound on a block's largest magnitude, as in vLLM, so that a block of zeros has a nonzero scale."""

CHUNK = 2**24
"""Number of elements to quantize at a time, which limits temporary memory (4 bytes per element)."""

G = TypeVar("G", bound=Hashable)
"""A process group."""


class QuantizedCopy(Generic[G]):
    """The quantized weights and scales that a source sends instead of its own parameters. `tensors` maps parameter
    names in the quantized shard to tensors, which are valid after `fill` until the weights change."""

    def __init__(
        self,
        source: Shard,
        quantized: Shard,
        shapes: Mapping[str, tuple[int, ...]],
        group_of: Callable[[str], G],
        device: torch.device | None = None,
    ):
        """
        Args:
            source: shard of the holder.
            quantized: shard of its quantized copy.
            shapes: canonical tensor -> full shape.
            group_of: returns the process group over which a parameter is sharded; its ranks hold parts of the same
                tensors, in the same order.
        """
        self._pieces: list[tuple[str, Piece]] = []
        self._scales = [
            (t.removesuffix(SCALES), p) for t, p in quantized.canonical_pieces if p.local not in source.shapes
        ]
        groups: dict[G, dict[str, tuple[int, ...]]] = {}
        for piece in (piece for piece in source.pieces if quantized.dtypes[piece.local] == FP8):
            assert piece.canonical is not None, f"quantized parameter {piece.local} has padding"
            self._pieces.append((piece.canonical, piece))
            grid = tuple(-(-size // BLOCK) for size in shapes[piece.canonical])
            groups.setdefault(group_of(piece.local), {})[piece.canonical] = grid
        names = {piece.local for _, piece in (*self._pieces, *self._scales)}
        self.tensors = {
            name: torch.empty(quantized.shapes[name], dtype=getattr(torch, quantized.dtypes[name]), device=device)
            for name in quantized.shapes
            if name in names
        }
        self._largest = {
            group: torch.empty(sum(map(prod, grids.values())), device=device) for group, grids in groups.items()
        }
        self._grids: dict[str, torch.Tensor] = {}
        """Views of _largest with one float32 per block: first its largest magnitude, later its scale."""
        for group, grids in groups.items():
            parts = self._largest[group].split([prod(grid) for grid in grids.values()])
            self._grids |= {name: part.view(grid) for (name, grid), part in zip(grids.items(), parts, strict=True)}

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, torch.Tensor], reduce_max: Callable[[torch.Tensor, G], None]) -> None:
        """Quantize the source's parameters. `reduce_max` reduces a tensor in place to its maximum over a group."""
        for largest in self._largest.values():
            largest.zero_()
        for tensor, piece in self._pieces:
            _add_largest(self._grids[tensor], view(parameters[piece.local], piece.local_rectangle), piece)
        for group, largest in self._largest.items():
            largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # replace NaN, which a reduction may ignore
            reduce_max(largest, group)
        self._check_finite()
        for largest in self._largest.values():
            largest.clamp_(min=SMALLEST).div_(LARGEST)
        for tensor, piece in self._pieces:
            self._quantize(tensor, piece, view(parameters[piece.local], piece.local_rectangle))
        for tensor, piece in self._scales:
            self.tensors[piece.local].copy_(view(self._grids[tensor], piece.canonical_rectangle))

    def _check_finite(self) -> None:
        """Raise a RuntimeError on all ranks that share a tensor with an infinite or NaN element, because its block
        would become NaN."""
        if all(bool(largest.isfinite().all()) for largest in self._largest.values()):
            return
        tensor, grid = next((name, grid) for name, grid in self._grids.items() if not grid.isfinite().all())
        row, column = (BLOCK * int(place) for place in (~grid.isfinite()).nonzero()[0])
        raise RuntimeError(
            f"{tensor}: a weight in the fp8 block at row {row}, column {column} is infinite or NaN. Fix: check the "
            "model's files, or resume from an earlier checkpoint with a lower learning rate"
        )

    def _quantize(self, tensor: str, piece: Piece, values: torch.Tensor) -> None:
        target = view(self.tensors[piece.local], piece.local_rectangle)
        (first, _), (left, right) = piece.canonical_rectangle
        # Multiply by the reciprocal as vLLM does, because division by the scale would round differently.
        factors = self._grids[tensor].reciprocal()
        columns = torch.arange(left, right, device=values.device) // BLOCK
        for start, part in _chunks(values):
            rows = torch.arange(first + start, first + start + len(part), device=values.device) // BLOCK
            target[start : start + len(part)].copy_(part.float() * factors[rows][:, columns])


def _add_largest(grid: torch.Tensor, values: torch.Tensor, piece: Piece) -> None:
    """Update the grid of per-block maxima with the magnitudes in a piece."""
    (top, _), (left, right) = piece.canonical_rectangle
    for start, part in _chunks(values):
        rectangle: Rectangle = ((top + start, top + start + len(part)), (left, right))
        blocks = blocks_of(rectangle)
        (before, after), (above, below) = (
            (start - first * BLOCK, last * BLOCK - stop)
            for (first, last), (start, stop) in zip(reversed(blocks), reversed(rectangle), strict=True)
        )
        rows, columns = shape_of(blocks)
        padded = torch.nn.functional.pad(part, (before, after, above, below)).view(rows, BLOCK, columns, BLOCK)
        maxima = view(grid, blocks)
        torch.maximum(maxima, padded.abs().amax(dim=(1, 3)).float(), out=maxima)


def _chunks(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each chunk of rows with the index of its first row."""
    rows = max(1, CHUNK // values.shape[1])
    for start in range(0, len(values), rows):
        yield start, values[start : start + rows]
