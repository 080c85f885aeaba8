"""Layer specs: Transformer Engine's layers if it is installed, else plain torch layers.

The torch layers fill two gaps in megatron-core's local layers: an RMSNorm that supports sequence parallelism, and a
core attention that supports packed documents.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.nn.attention.flex_attention import BlockMask

from megarl.core import device
from megarl.megatron import parallel
from megarl.models.shape import LayerKind, ModelShape
from megarl.ops.packed_attention import Documents, packed_attention
from megarl.ops.shared_attention import shared_attention
from megarl.ops.swiglu import swiglu
from megarl.resharding.families.adapters import EXPERTS
from megarl.resharding.families.canonical import parts_of_layer


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's packed-sequence parameters, extended for our layers.

    Attributes:
        documents: input to our attention, built once for all layers; None if Transformer Engine's attention is used.
        windowed: the same for layers with a sliding window; None if the model has none.
        positions: int64 [T] or, in time, height and width, [3, T], token positions for the rotary embedding, in the
            order of Megatron's split over context-parallel ranks; None derives them from the document boundaries.
        boundaries: int32 [D + 1], document boundaries, used by recurrent layers and Transformer Engine's attention.
        longest: length of the longest document.
        feature_places: int64 [f], indices of the hidden states on this rank that image features are added to.
    """

    documents: Documents | BlockMask | None = None
    windowed: Documents | BlockMask | None = None
    positions: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None
    longest: int | None = None
    feature_places: torch.Tensor | None = None

    @property
    def within_documents(self) -> PackedSeqParams:
        """Megatron's parameters for layers that process each document separately."""
        assert self.boundaries is not None and self.longest is not None, "the documents' lengths are unknown"
        return PackedSeqParams(
            "thd",
            cu_seqlens_q=self.boundaries,
            cu_seqlens_kv=self.boundaries,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums the weight's gradient over sequence-parallel ranks. With
    layernorm_zero_centered_gamma, it stores the weight minus one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        parallel.mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_zero_centered:
            return super().forward(x)
        # As in transformers, 1 + weight is not rounded to the model's dtype.
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer for latent attention that is replicated on every tensor-parallel rank, as in Transformer Engine.
    If it were sharded, as in megatron-core's own spec, the keys' rotary channels would lose part of their gradient."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, init_method, bias: bool, **_):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        init_method(self.weight)
        parallel.mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # Megatron's linear layers also return a bias
        self, input: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return super().forward(input), None


if importlib.util.find_spec("transformer_engine") is None:
    # Latent attention accepts only certain down-projections. Without Transformer Engine, its `Linear` is None.
    multi_latent_attention.Linear = ReplicatedLinear


class ExpertOutput(RowParallelLinear):
    """The second layer of an expert with biases. It clones the output: Megatron adds the bias in place, but autograd
    rejects this for the view that a reduction over a single rank returns."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, bias = super().forward(input_)
        return output.clone(), bias


class DocumentAttention(torch.nn.Module):
    """Causal attention within each document of a pack ("thd": query [T, heads, d] or [T, 1, heads, d]).

    Under context parallelism, a rank holds the queries for its own tokens and gathers all keys and values.

    Attributes:
        softmax_offset: the sinks of this rank's heads, [heads / tp], named as in Megatron's attention; None if the
            model has none.
        is_windowed: whether this layer has a sliding window.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_):
        super().__init__()
        assert config.kv_channels is not None, "Megatron has not derived kv_channels"
        self.context_group = parallel.context_group()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout
        # Megatron numbers layers from 1 across all pipeline stages.
        self.is_windowed = is_layer_window_attention(
            config.window_size,
            config.window_attn_skip_freq,  # pyright: ignore[reportArgumentType]  # None is allowed
            layer_number,
        )
        self.register_parameter("softmax_offset", _sinks(config) if config.softmax_type == "learnable" else None)

    def forward(self, query, key, value, *_, packed_seq_params: PackedDocuments, **__):
        num_tokens = query.shape[0]
        query, key, value = (x.reshape(num_tokens, -1, x.shape[-1]) for x in (query, key, value))
        if self.context_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, group=self.context_group) for x in (key, value))
        documents = packed_seq_params.windowed if self.is_windowed else packed_seq_params.documents
        dropout, sinks = self.dropout if self.training else 0.0, self.softmax_offset
        assert documents is not None, "the microbatch was prepared for Transformer Engine"
        if isinstance(documents, BlockMask):
            out = shared_attention(query, key, value.contiguous(), documents, self.scale, sinks)
        else:
            out = packed_attention(query, key, value, documents, self.scale, dropout, sinks)
        return out.reshape(num_tokens, -1)  # the shape of Transformer Engine's output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the sharded state for Megatron's checkpoints, which split the sinks by head."""
        assert metadata is not None, "Megatron has not passed its process groups in metadata"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel.tensor_group(is_expert=False),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _sinks(config: TransformerConfig) -> torch.nn.Parameter:
    num_heads = config.num_attention_heads // parallel.tensor_group(is_expert=False).size()
    sinks = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
    # Ranks have different heads. With this mark, Megatron sums their parts of the gradient norm, but not the gradients.
    parallel.mark(sinks, tensor_model_parallel=True, partition_dim=0)
    return sinks


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Latent attention with the norms and projections from the layer spec. Megatron's own resolver requires a norm for
    queries if key-value latents have one, but queries without a latent have none."""

    def _resolve_qk_norm_config(self, submodules: multi_latent_attention.MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class HeadNorm(torch.nn.RMSNorm):
    """The norm of a gated delta net's heads. Its weight is never stored minus one. Each tensor-parallel rank normalizes
    different heads, so the weight's gradient is summed over these ranks, with or without sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=parallel.tensor_group(is_expert=False))
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net, whose states start at zero in each document of a pack and whose decay is float32.

    On CPU, megarl.megatron.cpu_support replaces flash-linear-attention's kernels. Context-parallel ranks exchange
    tokens for heads, so that each rank processes whole documents.
    """

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.A_log = torch.nn.Parameter(self.A_log.detach().float())
        parallel.mark(self.A_log, tensor_model_parallel=True, partition_dim=0)

    def forward(self, hidden_states, *args, packed_seq_params: PackedDocuments, **kwargs):
        return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params.within_documents, **kwargs)


def uses_transformer_engine() -> bool:
    """Return whether the model uses Transformer Engine's layers."""
    return device.on_cuda() and importlib.util.find_spec("transformer_engine") is not None


def is_recurrent(config: TransformerConfig) -> bool:
    """Return whether the model has layers with a recurrent state."""
    return config.experimental_attention_variant == "gated_delta_net"


def requires_our_attention(config: TransformerConfig) -> bool:
    """Return whether the model's attention has sliding windows or sinks, so that only our attention can be used.
    Transformer Engine does not support sinks with packed documents."""
    return config.window_size is not None or config.softmax_type != "vanilla"


def splits_documents(is_recurrent: bool) -> bool:
    """Return whether context parallelism cuts each document separately, which requires document lengths that are
    multiples of 2 · cp. Our attention alone cuts the pack as a whole."""
    return is_recurrent or uses_transformer_engine()


def can_share_prompts(context_ranks: int, is_recurrent: bool) -> bool:
    """Return whether documents in a pack may share a prompt. Under context parallelism, Transformer Engine's attention
    splits each document over the ranks and requires its tokens to be consecutive in the pack. A recurrent state depends
    on the order of the tokens, so each document needs its own copy of the prompt."""
    return not is_recurrent and (context_ranks == 1 or not uses_transformer_engine())


def block_spec(
    config: TransformerConfig, shape: ModelShape, virtual: int | None, fused: bool
) -> TransformerBlockSubmodules:
    """Return the spec for the decoder layers in this rank's pipeline stage, or in one of its virtual stages. `virtual`
    is the virtual stage; None if the pipeline stage is not divided. `fused` selects Transformer Engine's layers."""
    first = get_transformer_layer_offset(config, vp_stage=virtual)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=virtual))
    specs = {kind: layer_spec(shape, kind, fused) for kind in {shape.kind(number) for number in numbers}}
    layers = [specs[shape.kind(number)] for number in numbers]
    return TransformerBlockSubmodules(layers, layer_norm=norm_class(fused))


def norm_class(fused: bool) -> Any:
    """Return the class of the norms outside the layers. Megatron's annotations do not accept this class."""
    if not fused:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def layer_spec(shape: ModelShape, kind: LayerKind, fused: bool) -> ModuleSpec:
    has_experts = kind.has_experts
    num_experts = shape.experts.count if shape.experts and has_experts else None
    latent, has_norms = shape.latent is not None, bool(shape.latent or shape.qk_norm)
    attention: dict[str, Any] = dict(multi_latent_attention=latent, qk_layernorm=has_norms)
    if fused:
        layer = get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm=has_experts, **attention)
        if kind.is_linear:
            submodules_of(layer).self_attention = _fused_delta_net()
            return layer
        needs_ours = shape.windows is not None or shape.has_sinks
        core = DocumentAttention if needs_ours else _fused_attention()
        submodules_of(submodules_of(layer).self_attention).core_attention = core
    else:
        layer = get_gpt_layer_local_spec(num_experts, normalization="RMSNorm", **attention)
        _use_our_layers(submodules_of(layer), shape, kind)
        submodules_of(layer).sharded_state_dict_keys_map = fused_names(shape, kind)
    if shape.latent:
        submodules_of(layer).self_attention.module = LatentAttention
    if shape.attention_out_bias or shape.mlp_bias:
        _drop_biases(submodules_of(layer), shape, has_experts)
    return layer


def fused_names(shape: ModelShape, kind: LayerKind) -> dict[str, str]:
    """Return parameter name in our layers -> name in Transformer Engine's layers. Checkpoints use Transformer Engine's
    names, so that either implementation can load them."""
    parts = (part for part in parts_of_layer(shape, kind) if not part.per_expert)
    pairs = (zip(part.megatron, part.transformer_engine, strict=True) for part in parts if part.transformer_engine)
    return {name: fused for part_pairs in pairs for name, fused in part_pairs}


def _drop_biases(layer: TransformerLayerSubmodules, shape: ModelShape, has_experts: bool) -> None:
    """Remove the biases that the model lacks. TransformerConfig adds biases to all linear layers or to none. Experts
    keep theirs: gpt-oss is the only model with experts that gets here, and its experts have biases."""
    attention, mlp = submodules_of(layer.self_attention), submodules_of(layer.mlp)
    if not shape.qkv_bias:
        attention.linear_qkv = without_bias(attention.linear_qkv)
    if not shape.attention_out_bias:
        attention.linear_proj = without_bias(attention.linear_proj)
    if not shape.mlp_bias and not has_experts:
        mlp.linear_fc1, mlp.linear_fc2 = without_bias(mlp.linear_fc1), without_bias(mlp.linear_fc2)


def submodules_of(spec: Any) -> Any:
    """Return a spec's submodules, which Megatron declares as objects. The spec of an MLP is a functools.partial that
    builds it; all other specs are ModuleSpecs."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def without_bias(linear: type) -> type:
    """Return a subclass of the linear layer that never has a bias."""

    class WithoutBias(linear):
        def __init__(self, *args, bias: bool, **kwargs):
            super().__init__(*args, bias=False, **kwargs)

    return WithoutBias


def _use_our_layers(layer: TransformerLayerSubmodules, shape: ModelShape, kind: LayerKind) -> None:
    attention = submodules_of(layer.self_attention)
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if kind.is_linear:
        layer.self_attention = _delta_net(ColumnParallelLinear, RowParallelLinear)
        return
    if kind.has_experts and shape.experts is not None and shape.experts.is_interleaved:
        submodules_of(submodules_of(layer.mlp).experts).linear_fc2 = ExpertOutput
    attention.core_attention = DocumentAttention
    if shape.latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.kv_layernorm = RMSNorm
        attention.q_layernorm = RMSNorm if shape.latent.query_rank else IdentityOp
    elif shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _delta_net(into: type, out: type) -> ModuleSpec:
    """Return the spec of a gated delta net, given its linear layers."""
    return ModuleSpec(
        module=DeltaNet, submodules=GatedDeltaNetSubmodules(in_proj=into, out_norm=HeadNorm, out_proj=out)
    )


def _fused_delta_net() -> ModuleSpec:
    """Return the spec of a gated delta net with Transformer Engine's layers. The input projection contains the norm."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    return _delta_net(TELayerNormColumnParallelLinear, TERowParallelLinear)


def replace_activations(model: torch.nn.Module, activation: Callable[[torch.Tensor], torch.Tensor] = swiglu) -> None:
    """Set our activation in all MLPs, including experts. Like Transformer Engine's activation, a gated one takes gate
    and up in one tensor; MLPs pass them this way if TransformerConfig.use_te_activation_func is set."""
    for module in model.modules():
        if isinstance(module, MLP | TEGroupedMLP):
            if isinstance(module.activation_func, torch.nn.Module):
                del module.activation_func  # torch does not replace a module (Transformer Engine's) with a function
            module.activation_func = activation


def unmark_expert_biases(model: torch.nn.Module) -> None:
    """Remove the mark for sequence parallelism from the biases of experts, whose layers are not sharded. Megatron would
    otherwise sum their gradients over tensor-parallel ranks a second time, and over ranks with different experts."""
    for name, parameter in model.named_parameters():
        if EXPERTS in name and name.rpartition(".")[2].startswith("bias"):
            parallel.mark(parameter, sequence_parallel=False)


def _fused_attention() -> type:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class FusedAttention(TEDotProductAttention):
        """Uses Transformer Engine's attention for packs without shared prompts, and our attention for packs with
        them."""

        def forward(self, query, key, value, *args, packed_seq_params: PackedDocuments, **kwargs):
            documents = packed_seq_params.documents
            if documents is None:
                packed = packed_seq_params.within_documents
                return super().forward(query, key, value, *args, packed_seq_params=packed, **kwargs)
            assert isinstance(documents, BlockMask), "the microbatch was prepared for torch layers"
            num_tokens = query.shape[0]
            query, key, value = (x.reshape(num_tokens, -1, x.shape[-1]) for x in (query, key, value))
            out = shared_attention(query, key, value, documents, self.softmax_scale)
            return out.reshape(num_tokens, -1)

    return FusedAttention
