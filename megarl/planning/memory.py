"""Peak memory of one trainer rank in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from megarl.resharding.families import megatron_holder
from megarl.resharding.families.shape import ModelShape

if TYPE_CHECKING:
    from megarl.config.schema import Layout

Recompute = Literal["none", "selective", "full"]
FLOAT32 = 4
TILE = (1024, 4096)
"""Tokens × vocabulary of a tile of the head's logits, of which megarl/ops/linear_head.py makes one at a time."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """In bytes. All of it is there at once: in the backward pass of the second update, when Adam has its state.

    weights       P · b: parameters of the rank, the vocabulary's padding included, of b bytes
    gradients     P · 4: the float32 buffer that they are accumulated and reduced in
    optimizer     P / d · 8, beside bfloat16 P / d · 12: Adam's two moments and the main weight, sharded over the
                  d = dp · cp data-parallel ranks
    activations   what the layers keep of the microbatches whose backward pass is still to come
    head          hidden states of the scored rows, their gradient, and the head's tiles; on the last stage
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


def rank_memory(
    hf_config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    num_bytes: int,
    num_tokens: int,
    num_rows: int,
    num_microbatches: int,
    recompute: Recompute = "none",
) -> RankMemory:
    """Of a dense model with the layers of `megatron/layer_spec.py`; Transformer Engine's keep less.

    num_bytes              of a parameter and of an activation: 4 (float32) or 2 (bfloat16)
    num_tokens, num_rows   of one microbatch of a replica

    Raises ValueError for experts or latent attention.
    """
    shape = ModelShape.of(hf_config)
    if shape.experts is not None or shape.latent is not None:
        raise ValueError(
            f"memory of {shape.model_type}: only dense models with plain attention have a closed form here"
        )
    shapes = megatron_holder(hf_config, layout, rank).shapes
    parameters = sum(prod(size) for size in shapes.values())
    layers = len({tuple(name.split(".")[:4]) for name in shapes if ".layers." in name})
    stage = rank // (layout.tp * layout.cp * layout.dp)
    own_tokens = -(-num_tokens // layout.cp)
    last = any("final_layernorm" in name for name in shapes)
    return RankMemory(
        weights=parameters * num_bytes,
        gradients=parameters * FLOAT32,
        optimizer=parameters * (8 if num_bytes == FLOAT32 else 12) // (layout.dp * layout.cp),
        activations=_activations(shape, layout, stage, layers, own_tokens, num_microbatches, num_bytes, recompute),
        head=_head(shape, layout, own_tokens, -(-num_rows // layout.cp), num_bytes) if last else 0,
    )


def layer_bytes(shape: ModelShape, layout: Layout, num_bytes: int, recompute: Recompute = "none") -> float:
    """What a layer keeps of one token until its backward pass.

    With h hidden, q and k rows of query and of key, f rows of the MLP, d the head's dimension, b bytes:

        norms       (4h + 2) · 4    input and normalised input of both, in float32, and their scales
        linear in   2h · b          of query, key and value; of gate and up
        attention   (4q + 2k + 4d) · b + heads · 4
                                    rotated query, then query, key, value and output of the kernel, input of the output
                                    layer; cosines and sines; the kernel's log-sum-exp
        MLP         5f · b          gate and up, the gate's SiLU, both its factors, the product

    Tensor parallelism divides attention and MLP, sequence parallelism the rest. Context parallelism shares out tokens,
    but keys and values of all of them are gathered.
    """
    sequence = layout.tp if layout.sequence_parallel else 1
    norms = ((4 * shape.hidden + 2) * FLOAT32) / sequence
    linear = 2 * shape.hidden * num_bytes / sequence
    rows = (4 * shape.query + 2 * shape.key * layout.cp) / layout.tp + 4 * shape.head_dim
    attention = rows * num_bytes + shape.heads / layout.tp * FLOAT32
    mlp = 5 * shape.intermediate * num_bytes / layout.tp
    if recompute == "full":
        return shape.hidden * num_bytes / sequence
    return norms + linear + attention + (0 if recompute == "selective" else mlp)


def layers_in_flight(layout: Layout, stage: int, num_layers: int, num_microbatches: int) -> float:
    """Layers that hold activations at once on a pipeline stage of num_layers, counted for each microbatch.

    One forward, one backward: a stage is ahead by as many microbatches as there are stages from it to the end.
    Interleaved, by 2 · (stages after it) + (vpp − 1) · pp + 1 of its chunks (Narayanan et al., arXiv:2104.04473).
    """
    if layout.vpp == 1:
        return num_layers * min(layout.pp - stage, num_microbatches)
    ahead = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return num_layers / layout.vpp * min(ahead, num_microbatches * layout.vpp)


def _activations(shape, layout, stage, num_layers, own_tokens, num_microbatches, num_bytes, recompute) -> int:
    """Where layers are recomputed, one of them has all that it would keep otherwise."""
    kept = layer_bytes(shape, layout, num_bytes, recompute)
    again = layer_bytes(shape, layout, num_bytes) - kept
    return round(own_tokens * (kept * layers_in_flight(layout, stage, num_layers, num_microbatches) + again))


def _head(shape, layout, own_tokens, own_rows, num_bytes) -> int:
    """The final norm keeps as much as any; a tile of logits, its gradient and one intermediate exist at a time."""
    norm = own_tokens * (2 * shape.hidden + 1) * FLOAT32
    rows = own_rows * shape.hidden * (num_bytes + FLOAT32)
    tiles = 3 * min(own_rows, TILE[0]) * min(-(-shape.vocab // layout.tp), TILE[1]) * FLOAT32
    return norm + rows + tiles
