"""Build a holder's shard from tilings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.resharding.families.canonical import Canonical, Shape
from megarl.resharding.families.tiling import Tiling
from megarl.resharding.piece import Piece, Rectangle, Shard, shape_of, span


class Share(NamedTuple):
    """The tensor-parallel size and rank that determine a rank's share of a parameter."""

    tp: int
    rank: int


class ShardBuilder:
    """Builds the shard of one rank, parameter by parameter. The model's tensors have the given dtype, except those that
    its family keeps in float32."""

    def __init__(self, canonical: Canonical, dtype: str):
        self._canonical, self._dtype = canonical, dtype
        self._shapes: dict[str, Shape] = {}
        self._pieces: list[Piece] = []
        self._dtypes: dict[str, str] = {}

    def add(self, local: str, tiling: Tiling, share: Share) -> None:
        """Add a parameter outside the layers."""
        self._add(local, tiling, self._canonical.outer_shapes, "", share)
        self._dtypes[local] = self._dtype

    def add_layer(
        self, layer: int, local_prefix: str, tilings: Mapping[str, Tiling], share: Share, dtype: str | None = None
    ) -> None:
        """Add parameters of the layer with global index `layer`. `dtype` defaults to the model's dtype."""
        shapes, prefix = self._canonical.layer_shapes(layer), self._canonical.layer_prefix(layer)
        precise = self._canonical.float32(layer)
        for local, tiling in tilings.items():
            self._add(local_prefix + local, tiling, shapes, prefix, share)
            is_precise = precise.issuperset(tiling.tensors)
            self._dtypes[local_prefix + local] = "float32" if is_precise else dtype or self._dtype

    def build(self) -> Shard:
        return Shard(self._shapes, tuple(self._pieces), self._dtypes)

    def _add(self, local: str, tiling: Tiling, shapes: Mapping[str, Shape], prefix: str, share: Share) -> None:
        axis, along = tiling.axis, tiling.axis if tiling.along is None else tiling.along
        sizes = [shapes[name][axis] for name in tiling.tensors]
        position, shape = 0, shapes[tiling.tensors[0]]
        rectangles: list[Rectangle] = []
        for tensor, start, stop in tiling.blocks(sizes, self._canonical.model, *share):
            canonical_rectangle = span(shape if tensor is None else shapes[tiling.tensors[tensor]], axis, start, stop)
            if tensor is None and along != axis:  # padding extends the previous block along the split axis
                rectangle = tuple((start, stop) if i == axis else side for i, side in enumerate(rectangles[-1]))
            else:
                shape = shape_of(canonical_rectangle)
                rectangle = span(shape, along, position, position + shape[along])
                position += shape[along]
            canonical = None if tensor is None else prefix + tiling.tensors[tensor]
            self._pieces.append(
                Piece(canonical, rectangle if canonical is None else canonical_rectangle, local, rectangle)
            )
            rectangles.append(rectangle)
        self._shapes[local] = tuple(max(stop for _, stop in sides) for sides in zip(*rectangles, strict=True))
