"""A parameter's extents: where a checkpoint stores its elements, according to Megatron's sharding metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megarl.resharding.checkpoint import Extent
from megarl.resharding.piece import Piece, Rectangle, whole


@dataclass(frozen=True, slots=True)
class CanonicalShard:
    """A parameter whose pieces are saved in their canonical tensors, independent of the layout.

    Attributes:
        key: the parameter's name.
        replica_id: Megatron's replica id: (pipeline stage, tensor-parallel rank, data-parallel rank).
        pieces: the parameter's pieces, each in one canonical tensor.
        shapes: canonical tensor name -> shape.
    """

    key: str
    data: torch.Tensor
    replica_id: tuple[int, int, int]
    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def extents(self) -> list[Extent]:
        return [
            Extent(
                parameter=self.key,
                rectangle=piece.local_rectangle,
                key=piece.canonical,
                global_shape=self.shapes[piece.canonical],
                offset=tuple(start for start, _ in piece.canonical_rectangle),
                resizable=False,
            )
            for piece in self.pieces
            if piece.canonical is not None
        ]


Shard = ShardedTensor | ShardedTensorFactory | CanonicalShard
"""Sharding description of a parameter: one of Megatron's classes, or CanonicalShard for adapters. A factory saves its
parameter as several tensors or pieces."""


def extents_of(shard: Shard, parameter: str) -> list[Extent]:
    """Return the extents that make up a parameter, labeled with the name `parameter`."""
    if isinstance(shard, CanonicalShard):
        return shard.extents()
    if isinstance(shard, ShardedTensor):
        return [_extent(shard, parameter, whole(tuple(shard.local_shape)))]
    # Build on the meta device, because only the offsets of the views are needed.
    meta = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="meta")
    tensors = nested_values(replace(shard, data=meta).build())
    return [_extent(tensor, parameter, _rectangle(tensor.data, meta)) for tensor in tensors]


def _extent(tensor: ShardedTensor, parameter: str, rectangle: Rectangle) -> Extent:
    return Extent(
        parameter=parameter,
        rectangle=rectangle,
        key=tensor.key,
        global_shape=tuple(tensor.global_shape),
        offset=tuple(tensor.global_offset),
        resizable=tensor.allow_shape_mismatch,
    )


def _rectangle(view: torch.Tensor, meta: torch.Tensor) -> Rectangle:
    """Return the rectangle that a view covers in its contiguous base tensor."""
    assert view._base is meta and view.stride() == meta.stride(), "not a rectangle of the parameter"
    rectangle, left = [], int(view.storage_offset())
    for stride, size in zip(view.stride(), view.shape, strict=True):
        start, left = divmod(left, stride)
        rectangle.append((start, start + size))
    return tuple(rectangle)
