"""Weights in the format of vLLM's fp8 checkpoints: matrices in float8_e4m3fn, with a float32 scale for each block of
128 × 128 elements.

A source describes the fp8 copy that it sends in place of its weights, a destination the parameters that such an engine
has. A plan between the two needs nothing of its own: scales are tensors, too, and a block that a cut splits is with
everybody who has a part of it, with the same scale.
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
"""What is added to a tensor's name for that of its scales, by which a block's elements are multiplied."""


def quantised_tensors(hf_config: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of a checkpoint's tensors that are in fp8: the matrices of all layers but routers'."""
    canonical = Canonical(hf_config)
    return frozenset(
        canonical.layer_prefix(layer) + name
        for layer in range(canonical.model.num_layers)
        for name in canonical.quantised(layer)
    )


def quantization_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says of such a checkpoint. Routers are named, which vLLM would quantise in some
    families."""
    canonical = Canonical(hf_config)
    routers = [
        canonical.layer_prefix(layer) + name.removesuffix(".weight")
        for layer in range(canonical.model.num_layers)
        for part in canonical.layer_parts(layer)
        if not part.quantised
        for name in part.tensors
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": routers,
    }


def quantised_sources(hf_config: Mapping[str, Any], holders: Sequence[Holder]) -> list[Holder]:
    """Returns these holders of a model's weights as holders of their fp8 copies."""
    tensors = quantised_tensors(hf_config)
    return _with_shards(holders, lambda shard: _source(shard, tensors))


def quantised_destinations(hf_config: Mapping[str, Any], holders: Sequence[Holder]) -> list[Holder]:
    """Returns these holders of a model, workers of engines or a folder, as holders of it in fp8. Raises UserError where
    a cut splits a block."""
    tensors = quantised_tensors(hf_config)
    return _with_shards(holders, lambda shard: _destination(shard, tensors))


def blocks_of(rectangle: Rectangle) -> Rectangle:
    """Returns the blocks of which a rectangle has elements, as a rectangle of the grid of blocks."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in rectangle)


def _with_shards(holders: Sequence[Holder], change: Callable[[Shard], Shard]) -> list[Holder]:
    shards: dict[Shard, Shard] = {}
    for holder in holders:
        if holder.shard not in shards:
            shards[holder.shard] = change(holder.shard)
    return [replace(holder, shard=shards[holder.shard]) for holder in holders]


def _source(shard: Shard, tensors: Collection[str]) -> Shard:
    """Scales are in a parameter of their own for each tensor, with those of all blocks of which the shard has a
    part."""
    shapes, dtypes, pieces = dict(shard.shapes), dict(shard.dtypes), list(shard.pieces)
    blocks: dict[str, list[Rectangle]] = {}
    for piece in _quantised(shard, tensors):
        dtypes[piece.local] = FP8
        blocks.setdefault(piece.canonical, []).append(blocks_of(piece.canonical_rectangle))
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
    for piece in _quantised(shard, tensors):
        _check_blocks(piece, shard.shapes[piece.local])
        name = piece.local + SCALES
        dtypes[piece.local] = FP8
        shapes[name], dtypes[name] = shape_of(blocks_of(whole(shard.shapes[piece.local]))), "float32"
        scales = blocks_of(piece.canonical_rectangle), name, blocks_of(piece.local_rectangle)
        pieces.append(Piece(piece.canonical + SCALES, *scales))
    return Shard(shapes, tuple(pieces), dtypes)


def _quantised(shard: Shard, tensors: Collection[str]) -> list[Piece]:
    return [piece for piece in shard.pieces if piece.canonical in tensors]


def _check_blocks(piece: Piece, shape: tuple[int, ...]) -> None:
    """Checks that the piece begins and ends where blocks do, in its tensor and in its parameter."""
    sides = zip(piece.canonical_rectangle, piece.local_rectangle, shape, strict=True)
    if not all(
        start % BLOCK == at % BLOCK == 0 and (end == size or end % BLOCK == 0) for (start, _), (at, end), size in sides
    ):
        rectangle = " × ".join(f"{start}:{stop}" for start, stop in piece.canonical_rectangle)
        raise UserError(
            f"{piece.local} has {rectangle} of {piece.canonical}, and fp8 blocks of {BLOCK} × {BLOCK} cannot be cut; "
            "give a smaller tp, whole precision (without fp8), or for experts whole ones on each worker (ep=true; in a "
            "recipe rollout.vllm_overrides={enable_expert_parallel: true})"
        )
