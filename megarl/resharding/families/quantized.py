"""Describe weights in vLLM's fp8 checkpoint format: float8_e4m3fn matrices with a float32 scale per 128 × 128 block.

A source holder describes the fp8 copy that it sends instead of its weights; a destination holder describes the
parameters of an engine with quantized weights. Planning needs no special case, because scales are ordinary tensors. If
a source shard boundary splits a block, every rank with part of the block holds the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.core.errors import UserError
from megarl.models.huggingface import FP8_BLOCK as BLOCK
from megarl.resharding.families.canonical import Canonical
from megarl.resharding.piece import Holder, Piece, Rectangle, Shard, shape_of, whole

FP8 = "float8_e4m3fn"
SCALES = "_scale_inv"
"""Name suffix of a tensor's scales. Dequantization multiplies the elements in a block by the block's scale."""


def quantized_tensors(hf_config: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the quantized tensors: all matrices in the decoder layers, including the MTP layer's, except
    routers, gates of shared experts and MTP input projections."""
    canonical = Canonical(hf_config)
    return frozenset(
        canonical.layer_prefix(layer) + name
        for layer in range(canonical.num_layers)
        for name in canonical.quantized(layer)
    )


def quantization_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config for config.json. It excludes routers and gates of shared experts, because vLLM
    would quantize some of them."""
    canonical = Canonical(hf_config)
    routers = [
        canonical.layer_prefix(layer) + name.removesuffix(".weight")
        for layer in range(canonical.model.num_layers)
        for part in canonical.layer_parts(layer)
        if not part.quantized
        for name in part.tensors
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": routers,
    }


def quantized_sources(hf_config: Mapping[str, Any], holders: Sequence[Holder]) -> list[Holder]:
    """Return the source holders with their weights replaced by fp8 copies."""
    tensors = quantized_tensors(hf_config)
    return _with_shards(holders, lambda shard: _source(shard, tensors))


def quantized_destinations(hf_config: Mapping[str, Any], holders: Sequence[Holder]) -> list[Holder]:
    """Return the destination holders (engine workers or a folder) with their weights replaced by fp8 weights. Raise a
    UserError if a shard boundary splits a block."""
    tensors = quantized_tensors(hf_config)
    return _with_shards(holders, lambda shard: _destination(shard, tensors))


def blocks_of(rectangle: Rectangle) -> Rectangle:
    """Return the rectangle in the block grid that covers a rectangle of elements."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in rectangle)


def _with_shards(holders: Sequence[Holder], change: Callable[[Shard], Shard]) -> list[Holder]:
    shards: dict[Shard, Shard] = {}
    for holder in holders:
        if holder.shard not in shards:
            shards[holder.shard] = change(holder.shard)
    return [replace(holder, shard=shards[holder.shard]) for holder in holders]


def _source(shard: Shard, tensors: Collection[str]) -> Shard:
    """Add one scale parameter per tensor. It covers all blocks that overlap the shard."""
    shapes, dtypes, pieces = dict(shard.shapes), dict(shard.dtypes), list(shard.pieces)
    blocks: dict[str, list[Rectangle]] = {}
    for tensor, piece in _quantized(shard, tensors):
        dtypes[piece.local] = FP8
        blocks.setdefault(tensor, []).append(blocks_of(piece.canonical_rectangle))
    for tensor, parts in blocks.items():
        bounds = tuple(
            (min(low), max(high)) for low, high in (zip(*side, strict=True) for side in zip(*parts, strict=True))
        )
        name, shape = tensor + SCALES, shape_of(bounds)
        shapes[name], dtypes[name] = shape, "float32"
        pieces.append(Piece(name, bounds, name, whole(shape)))
    return Shard(shapes, tuple(pieces), dtypes)


def _destination(shard: Shard, tensors: Collection[str]) -> Shard:
    shapes, dtypes, pieces = dict(shard.shapes), dict(shard.dtypes), list(shard.pieces)
    for tensor, piece in _quantized(shard, tensors):
        _check_blocks(piece, shard.shapes[piece.local])
        name = piece.local + SCALES
        dtypes[piece.local] = FP8
        shapes[name], dtypes[name] = shape_of(blocks_of(whole(shard.shapes[piece.local]))), "float32"
        scales = blocks_of(piece.canonical_rectangle), name, blocks_of(piece.local_rectangle)
        pieces.append(Piece(tensor + SCALES, *scales))
    return Shard(shapes, tuple(pieces), dtypes)


def _quantized(shard: Shard, tensors: Collection[str]) -> list[tuple[str, Piece]]:
    return [(tensor, piece) for tensor, piece in shard.canonical_pieces if tensor in tensors]


def _check_blocks(piece: Piece, shape: tuple[int, ...]) -> None:
    """Check that the piece starts and ends at block boundaries, both in its canonical tensor and in its parameter."""
    sides = zip(piece.canonical_rectangle, piece.local_rectangle, shape, strict=True)
    if not all(
        start % BLOCK == local % BLOCK == 0 and (end == size or end % BLOCK == 0)
        for (start, _), (local, end), size in sides
    ):
        rectangle = " × ".join(f"{start}:{stop}" for start, stop in piece.canonical_rectangle)
        raise UserError(
            f"{piece.local}: the slice {rectangle} of {piece.canonical} splits {BLOCK} × {BLOCK} fp8 blocks. Fix: "
            "use a smaller tp, disable fp8, or keep whole experts on each worker (ep=true, or in a recipe "
            "rollout.vllm_overrides={enable_expert_parallel: true})"
        )
