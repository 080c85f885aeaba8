"""Puts a holder together, parameter by parameter, from tilings."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.resharding.families.canonical import Canonical, Shape
from megarl.resharding.families.tiling import Tiling
from megarl.resharding.piece import Holder, Piece, span


class HolderBuilder:
    """One tensor-parallel rank's parameters."""

    def __init__(self, canonical: Canonical, tp: int, rank: int):
        self._canonical, self._tp, self._rank = canonical, tp, rank
        self._shapes: dict[str, Shape] = {}
        self._pieces: list[Piece] = []

    def add(self, local: str, tiling: Tiling) -> None:
        """A parameter outside the layers."""
        self._add(local, tiling, self._canonical.outer_shapes, "")

    def add_layer(self, layer: int, local_prefix: str, tilings: Mapping[str, Tiling]) -> None:
        """layer: its number in the whole model."""
        shapes, prefix = self._canonical.layer_shapes(layer), self._canonical.layer_prefix(layer)
        for local, tiling in tilings.items():
            self._add(local_prefix + local, tiling, shapes, prefix)

    def build(self, name: str) -> Holder:
        return Holder(name, self._shapes, tuple(self._pieces))

    def _add(self, local: str, tiling: Tiling, shapes: Mapping[str, Shape], prefix: str) -> None:
        axis, position = tiling.axis, 0
        sizes = [shapes[name][axis] for name in tiling.tensors]
        first = shapes[tiling.tensors[0]]
        for tensor, start, stop in tiling.blocks(sizes, self._canonical.model, self._tp, self._rank):
            here = span(first, axis, position, position + stop - start)
            there = here if tensor is None else span(shapes[tiling.tensors[tensor]], axis, start, stop)
            canonical = None if tensor is None else prefix + tiling.tensors[tensor]
            self._pieces.append(Piece(canonical, there, local, here))
            position += stop - start
        self._shapes[local] = (*first[:axis], position, *first[axis + 1 :])
