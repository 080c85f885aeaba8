"""Closed-form estimate of a trainer rank's peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

from megarl.config.model_schema import Layout, Lora
from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape, shape_of
from megarl.models.flops import orthogonalization_flops
from megarl.models.huggingface import Experts, LatentAttention, LinearAttention
from megarl.models.mtp import trains_mtp
from megarl.models.shape import LayerKind, ModelShape
from megarl.ops.tile import TILE
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.families.adapters import EXPERTS, SHARED, adapted_weights, adapter_holder
from megarl.resharding.families.mtp import MTP
from megarl.resharding.families.z_image import CAPTION_STACK
from megarl.resharding.piece import Holder, num_elements
from megarl.resharding.selection import layer_matrices

Recompute = Literal["none", "selective", "full"]
FLOAT32 = 4

DECAY = ".self_attention.A_log"
"""Suffix of a parameter that only gated delta nets have."""


def item_bytes(config: Config) -> int:
    """Return the number of bytes per parameter or activation element in the run's dtype."""
    return FLOAT32 if config.model.dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's peak memory in bytes. The peak is in the backward pass of the second update, once Adam's state exists.

    Attributes:
        weights: P · b for P parameters with b bytes each, including vocabulary padding. With A adapter parameters,
            (P + M) · b + A · 4, because a merged copy of the M adapted matrix elements is also kept.
        gradients: P · 4, or A · 4 with adapters: the float32 buffer for accumulating and reducing gradients. optimizer:
        P / d · 8, or P / d · 12 for 2-byte weights: Adam's two moments and the main weights, sharded
            over d = dp · cp data-parallel ranks. Experts are sharded over the d = tp · cp · dp / (etp · ep) ranks that
            hold the same experts. Adapters are float32 and take A / d · 8. Each parameter that Muon updates has one
            moment and takes 4 bytes less.
        activations: outputs that the layers keep for microbatches whose backward pass has not yet run.
        head: hidden states of the scored rows, their gradient, and one tile of logits; on the last stage only.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameter counts on one rank.

    Attributes:
        count: number of all parameters, including vocabulary padding.
        experts: number of parameters in routed experts.
        matrices: number of elements in the layers' weight matrices, without routers and modulations.
        layers: the kind of each layer on the rank. A denoiser's image refiners count as layers, but its caption
            refiners do not, because the two together process each token once.
        is_last: whether the rank is on the last stage, which has the final norm or the output layer.
        adapters: number of adapter parameters, the only trained ones; None without adapters. expert_adapters: number of
        adapter parameters for experts, without factors shared by all experts in a layer. merged: number of matrix
        elements with adapters. The rank keeps a merged copy of them for the engines.
        constant: number of parameters that are never trained, such as SD3's position embedding.
        constant_experts: number of those in routed experts.
        muon: number of parameters that Muon updates.
        muon_experts: number of parameters in routed experts that Muon updates.
        muon_flops: operations per update for orthogonalizing Muon's matrices, weighted by the fraction of each matrix
            that the rank holds.
        muon_expert_flops: the part of muon_flops for routed experts.
    """

    count: int
    experts: int
    matrices: int
    layers: tuple[LayerKind, ...]
    is_last: bool
    adapters: int | None = None
    expert_adapters: int = 0
    merged: int = 0
    constant: int = 0
    constant_experts: int = 0
    muon: int = 0
    muon_experts: int = 0
    muon_flops: float = 0.0
    muon_expert_flops: float = 0.0

    @property
    def trained(self) -> int:
        return self.count - self.constant if self.adapters is None else self.adapters

    @property
    def trained_experts(self) -> int:
        return self.experts - self.constant_experts if self.adapters is None else self.expert_adapters

    def weight_bytes(self, num_bytes: int) -> int:
        """Return the size of the weights in bytes, as in RankMemory. num_bytes: bytes per element."""
        if self.adapters is None:
            return self.count * num_bytes
        return (self.count + self.merged) * num_bytes + self.adapters * FLOAT32

    @classmethod
    def of(
        cls,
        hf_config: Mapping[str, Any],
        layout: Layout,
        rank: int,
        lora: Lora | None = None,
        uses_muon: bool = False,
    ) -> RankParameters:
        holder = megatron_holder(hf_config, layout, rank)
        adapters, expert_adapters, merged = None, 0, 0
        if lora is not None:
            assert lora.rank is not None, "actor.lora.rank is not set"
            factors = adapter_holder(holder, lora.rank, lora.share_experts).shapes
            adapters = sum(map(prod, factors.values()))
            expert_adapters = sum(prod(s) for name, s in factors.items() if EXPERTS in name and SHARED not in name)
            merged = sum(prod(holder.shapes[adapted.weight]) for adapted in adapted_weights(holder, lora.share_experts))
        sizes = {name: prod(size) for name, size in holder.shapes.items()}
        kept = {name for name in sizes if MTP in name and not trains_mtp(hf_config)}
        matrices = layer_matrices(holder)
        updated = [name for name in matrices if name not in kept] if uses_muon else []
        muon_flops = _muon_flops(hf_config, holder, updated)
        return cls(
            count=sum(sizes.values()),
            experts=sum(size for name, size in sizes.items() if EXPERTS in name),
            matrices=sum(sizes[name] for name in matrices),
            layers=tuple(_layers(sizes)),
            is_last=any("final_layernorm" in name or ".output_modulation." in name for name in sizes),
            adapters=adapters,
            expert_adapters=expert_adapters,
            merged=merged,
            constant=sum(size for name, size in sizes.items() if name.endswith(".position_embedding") or name in kept),
            constant_experts=sum(sizes[name] for name in kept if EXPERTS in name),
            muon=sum(sizes[name] for name in updated),
            muon_experts=sum(sizes[name] for name in updated if EXPERTS in name),
            muon_flops=sum(muon_flops.values()),
            muon_expert_flops=sum(flops for name, flops in muon_flops.items() if EXPERTS in name),
        )


def rank_memory(
    hf_config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    num_bytes: int,
    num_tokens: int,
    num_rows: int,
    num_microbatches: int,
    recompute: Recompute = "none",
    lora: Lora | None = None,
    uses_muon: bool = False,
) -> RankMemory:
    """Return a rank's peak memory.

    Assumes the layers in `megatron/layer_spec.py` (Transformer Engine's layers keep less) and a router that balances
    the load of the experts.

    Args:
        num_bytes: bytes per parameter or activation element: 4 (float32) or 2 (bfloat16, float16).
        num_tokens: number of tokens in one microbatch on a replica.
        num_rows: number of scored rows in one microbatch on a replica.
    """
    shape, held = shape_of(hf_config), RankParameters.of(hf_config, layout, rank, lora, uses_muon)
    stage = rank // (layout.tp * layout.cp * layout.dp)
    return stage_memory(shape, layout, stage, held, num_bytes, num_tokens, num_rows, num_microbatches, recompute)


def stage_memory(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    held: RankParameters,
    num_bytes: int,
    num_tokens: int,
    num_rows: int,
    num_microbatches: int,
    recompute: Recompute = "none",
) -> RankMemory:
    """Return the peak memory on a pipeline stage's rank with `held` parameters. See `rank_memory`."""
    rank_tokens, rank_rows = -(-num_tokens // layout.cp), -(-num_rows // layout.cp)
    in_flight = layers_in_flight(layout, stage, len(held.layers), num_microbatches)
    head = _head(shape, layout, rank_tokens, rank_rows, num_bytes) if held.is_last else 0
    if shape.trains_mtp and held.is_last:
        head += _mtp(shape, layout, rank_tokens, rank_rows, num_bytes, recompute)
    has_main_weights = num_bytes != FLOAT32 and held.adapters is None
    main_weights = optimizer_shard_size(layout, held) * FLOAT32 if has_main_weights else 0
    return RankMemory(
        weights=held.weight_bytes(num_bytes),
        gradients=held.trained * FLOAT32,
        optimizer=_moment_bytes(layout, held) + main_weights,
        activations=_activations(shape, layout, held.layers, in_flight, rank_tokens, num_bytes, recompute),
        head=head,
    )


def _muon_flops(hf_config: Mapping[str, Any], holder: Holder, names: Sequence[str]) -> dict[str, float]:
    """Return the operations for orthogonalizing the checkpoint matrices in these parameters, by parameter, weighted by
    the fraction of each matrix that the parameter contains."""
    if not names:
        return {}
    shapes, pieces = huggingface_holder(hf_config).shapes, holder.shard.by_parameter()
    return {
        name: sum(
            orthogonalization_flops(*shapes[piece.canonical])
            * num_elements(piece.local_rectangle)
            / prod(shapes[piece.canonical])
            for piece in pieces[name]
            if piece.canonical is not None
        )
        for name in names
    }


def optimizer_shard_size(layout: Layout, held: RankParameters) -> int:
    """Return the number of parameters that a rank updates, P / d as in RankMemory."""
    return _shard_size(layout, held.trained, held.trained_experts)


def _shard_size(layout: Layout, count: int, experts: int) -> int:
    """Return a data-parallel rank's share of `count` parameters, including `experts` parameters in routed experts."""
    dense = (count - experts) // (layout.dp * layout.cp)
    return dense + experts * layout.expert_tp * layout.ep // (layout.tp * layout.cp * layout.dp)


def _moment_bytes(layout: Layout, held: RankParameters) -> int:
    """Return the size in bytes of a rank's moments: two per parameter, or one if Muon updates it."""
    saved = _shard_size(layout, held.muon, held.muon_experts)
    return (2 * optimizer_shard_size(layout, held) - saved) * FLOAT32


def saved_bytes(layout: Layout, held: RankParameters, num_bytes: int) -> int:
    """Return the number of bytes that a rank writes to a checkpoint, P / d · (b + 12) with AdamW: the weights that the
    rank updates (b bytes each), and their main weights and moments in float32."""
    weight_bytes = num_bytes if held.adapters is None else FLOAT32
    return optimizer_shard_size(layout, held) * (weight_bytes + FLOAT32) + _moment_bytes(layout, held)


def forward_bytes(
    shape: ModelShape, layout: Layout, held: RankParameters, num_bytes: int, num_tokens: int, num_rows: int
) -> int:
    """Return the memory in bytes that a forward-only pass needs on a rank: the largest layer's activations, input and
    output and, on the last stage, the head's tensors."""
    rank_tokens, sequence = -(-num_tokens // layout.cp), layout.tp if layout.sequence_parallel else 1
    layers = [layer_bytes(shape, layout, num_bytes, "none", *kind) for kind in set(held.layers)]
    hidden = 2 * shape.hidden * num_bytes / sequence
    head = _head(shape, layout, rank_tokens, -(-num_rows // layout.cp), num_bytes) if held.is_last else 0
    return round(rank_tokens * (max(layers, default=0) + hidden)) + head


def layer_bytes(
    shape: ModelShape,
    layout: Layout,
    num_bytes: int,
    recompute: Recompute = "none",
    has_experts: bool = False,
    is_linear: bool = False,
) -> float:
    """Return the number of bytes that a layer keeps per token until its backward pass.

    With hidden size h and b bytes per element:

        norms       2h · b + 2 · 4  inputs of both norms, and their scales in float32
        linear in   2h · b          inputs of attention's projections and of the MLP or router
        MLP         3f · b          gate, up, and the activation function's output, with f rows each

    This holds for the GPU's kernels. On CPU, torch's norms also keep their inputs and outputs in float32.

    Z-Image's layer has two more norms, 2h · b + 2 · 4. It also keeps the norms' outputs, which the modulation scales,
    4h · b.

    SD3's MLP has no gate. For each of attention and MLP, its layer keeps the norm's output and the output that the gate
    multiplies, 4h · b in total. A second attention also keeps its input and output, 2h · b. It is counted for all
    tokens, although captions do not have it, and with pipeline parallelism in all layers, because the first stage may
    hold all layers that have it.

    Tensor parallelism splits attention and MLP; sequence parallelism splits the rest. Context parallelism splits the
    tokens, but all keys and values are gathered.
    """
    sequence = layout.tp if layout.sequence_parallel else 1
    norms = (2 * shape.hidden * num_bytes + 2 * FLOAT32) / sequence
    linear = 2 * shape.hidden * num_bytes / sequence
    is_sd3 = isinstance(shape, StableDiffusion3Shape)
    if is_sd3:
        norms += 4 * shape.hidden * num_bytes / sequence
    elif isinstance(shape, DenoiserShape):
        norms = 2 * norms + 4 * shape.hidden * num_bytes / sequence
    if recompute == "full":
        return shape.hidden * num_bytes / sequence
    attention = _attention if shape.latent is None else partial(_latent_attention, shape.latent)
    if is_linear and shape.linear is not None:
        attention = partial(_linear_attention, shape.linear)
    kept = norms + linear + attention(shape, layout, num_bytes)
    if is_sd3 and shape.dual_layers:
        share = len(shape.dual_layers) / shape.num_layers if layout.pp == 1 else 1.0
        second = 2 * shape.hidden * num_bytes / sequence + attention(shape, layout, num_bytes)
        kept += share * second
    if recompute == "selective":
        return kept
    if shape.experts is None or not has_experts:
        return kept + (2 if is_sd3 else 3) * shape.intermediate * num_bytes / layout.tp
    return kept + _experts(shape.experts, shape.hidden, layout, num_bytes)


def _attention(shape: ModelShape, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token in attention, with q query rows, k key rows and head dimension d.

    (3q + 2k + 4d) · b + heads · 4    query, key, value and output of the kernel, input of the output projection;
                                      cosines and sines, but not in denoisers; the kernel's log-sum-exp
    (2q + 2k) · b + heads · 4         query and key norms, if the model has them: the queries, the first projection's
                                      output (the keys are a view of it), and the scales
    heads · (b + 4)                   sinks, if the model has them: the keys' share of the softmax in two dtypes
    """
    rows = (3 * shape.query + 2 * shape.key * layout.cp) / layout.tp
    if not isinstance(shape, DenoiserShape):
        rows += 4 * shape.head_dim
    kept = rows * num_bytes + shape.heads / layout.tp * FLOAT32
    if shape.has_sinks:
        kept += shape.heads / layout.tp * (num_bytes + FLOAT32)
    if not shape.qk_norm:
        return kept
    inputs = 2 * (shape.query + shape.key) * num_bytes
    if shape.has_output_gate:
        inputs += 2 * shape.query * num_bytes + shape.query * FLOAT32  # the gates, the gated output, the gates' sigmoid
    return kept + (inputs + (shape.heads + shape.kv_heads) * FLOAT32) / layout.tp


def _linear_attention(linear: LinearAttention, shape: ModelShape, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token in a gated delta net.

    With k key rows, v value rows, c = 2k + v channels and n value heads of d key channels each:

    (3c + v) · b                inputs and outputs of the convolution and of the norm of queries and keys, and gates
    (2nd + v) · b + 64n · b     inputs of the delta rule, with queries and keys for every value head, and the inverse of
                                the system of each chunk of 64 tokens
    2v · b + v · 4 + 3n · 4     outputs of the delta rule and of the gated norm, the gates' SiLU, decays and step sizes

    Context parallelism splits the heads instead of the tokens, which amounts to the same number of bytes.
    """
    rows = 3 * linear.channels + 4 * linear.values + linear.value_heads * (2 * linear.key_dim + 64)
    precise = linear.values + 3 * linear.value_heads
    return (rows * num_bytes + precise * FLOAT32) / layout.tp


def _latent_attention(latent: LatentAttention, shape: ModelShape, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token in latent attention.

    With q query rows, v value rows, p channels per head with a rotary embedding, and r the sum of the latents' ranks:

    (2r + p) · b + 2 · 4              inputs of the latents' norms with the key channels that have a rotary embedding,
                                      inputs of the projections after the norms, and the norms' scales
    (4q + v + 4p) · b + heads · 4     as in `_attention`, with values padded to the width of keys, and the output
                                      truncated to the width of values
    """
    sequence = layout.tp if layout.sequence_parallel else 1
    ranks = (latent.query_rank or 0) + latent.kv_rank
    latents = (2 * ranks + latent.position_dim) * num_bytes + 2 * FLOAT32
    rows = (2 * shape.query * (1 + layout.cp) + shape.value) / layout.tp + 4 * latent.position_dim
    return latents / sequence + rows * num_bytes + shape.heads / layout.tp * FLOAT32


def _experts(experts: Experts, hidden: int, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token in a mixture of experts.

    With e experts of f rows each, a active experts per token, and s rows in shared experts:

        a (h + 4f) · b    dispatched tokens; the experts' MLPs and their weighted activations
        3s · b            the shared experts' MLP
        9e + 20a          the router's scores (twice) and selection mask; the selected indices and scores (twice)

    Ranks that share a sequence split its tokens. Ranks that share an expert gather all tokens for that expert.
    """
    sent = experts.active * hidden * layout.expert_tp / layout.tp
    inside = 4 * experts.active * experts.intermediate / layout.tp
    shared = 3 * experts.shared_intermediate / layout.tp
    return (sent + inside + shared) * num_bytes + (9 * experts.count + 20 * experts.active) / layout.tp


def layers_in_flight(layout: Layout, stage: int, num_layers: int, num_microbatches: int) -> float:
    """Return the number of (layer, microbatch) pairs whose activations a pipeline stage of num_layers holds at once. In
    the 1F1B schedule, a stage runs ahead by one microbatch for itself and each later stage. In the interleaved
    schedule, it runs ahead by 2 · (later stages) + (vpp − 1) · pp + 1 chunks (Narayanan et al., arXiv:2104.04473)."""
    if layout.vpp == 1:
        return num_layers * min(layout.pp - stage, num_microbatches)
    ahead = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return num_layers / layout.vpp * min(ahead, num_microbatches * layout.vpp)


def _layers(names: Iterable[str]) -> list[LayerKind]:
    """Return the kind of each layer that contains any of the named parameters."""
    layers: dict[str, LayerKind] = {}
    for name in names:
        before, _, after = name.partition(".layers.")
        if after and CAPTION_STACK not in before and MTP not in name:
            layer = f"{before}.{after.partition('.')[0]}"
            mixed, linear = layers.get(layer, LayerKind(False, False))
            layers[layer] = LayerKind(mixed or EXPERTS in name, linear or DECAY in name)
    return list(layers.values())


def _activations(shape, layout, layers, in_flight, rank_tokens, num_bytes, recompute) -> int:
    """Return the size of the activations in a stage's layers, in bytes. `layers` lists the kind of each layer. With
    recomputation, only one layer at a time holds the activations that it would keep without recomputation."""
    if not layers:
        return 0
    kinds = set(layers)
    kept = {kind: layer_bytes(shape, layout, num_bytes, recompute, *kind) for kind in kinds}
    recomputed = max(layer_bytes(shape, layout, num_bytes, "none", *kind) - kept[kind] for kind in kinds)
    return round(rank_tokens * (sum(kept[kind] for kind in layers) / len(layers) * in_flight + recomputed))


def _head(shape, layout, rank_tokens, rank_rows, num_bytes) -> int:
    """Return the bytes that the last stage holds after its layers: the final norm, the scored rows and one tile of
    float32 logits. If the tile's gradient is also float32, it overwrites the tile.

    A denoiser keeps the input of its final norm, the norm's output and the scaled output, and the velocities with their
    gradient."""
    if isinstance(shape, DenoiserShape):
        tokens = rank_tokens / (layout.tp if layout.sequence_parallel else 1)
        return round(tokens * (3 * shape.hidden * num_bytes + 2 * FLOAT32 + 2 * shape.patch_dim * FLOAT32))
    norm = rank_tokens * (shape.hidden * num_bytes + FLOAT32)
    rows = rank_rows * shape.hidden * (num_bytes + FLOAT32)
    tile = min(rank_rows, TILE[0]) * min(-(-shape.vocab // layout.tp), TILE[1])
    gradient = num_bytes if num_bytes < FLOAT32 else 0
    return norm + rows + tile * (FLOAT32 + gradient)


def _mtp(shape, layout, rank_tokens, rank_rows, num_bytes, recompute) -> int:
    """Return the bytes that training the MTP layer needs on the last stage: the layer's activations, the inputs and
    outputs of its norms and of its projection, 7h · b + 3 · 4, the rows that it scores and, with pipeline parallelism,
    a copy of the embedding."""
    sequence = layout.tp if layout.sequence_parallel else 1
    kept = (7 * shape.hidden * num_bytes + 3 * FLOAT32) / sequence
    kept += layer_bytes(shape, layout, num_bytes, recompute, *shape.kind(shape.num_layers))
    embedding = shape.vocab * shape.hidden * num_bytes / layout.tp if layout.pp > 1 else 0
    return round(rank_tokens * kept + rank_rows * shape.hidden * (num_bytes + FLOAT32) + embedding)
