"""Z-Image's layers: megatron-core's attention and MLP between norms, modulated by the noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.megatron import parallel
from megarl.megatron.model.denoiser.inputs import DocumentStream
from megarl.megatron.model.layer_spec import RMSNorm
from megarl.ops.full_attention import full_attention
from megarl.ops.modulation import modulate


class FullAttention(torch.nn.Module):
    """Attention to all tokens in the same document. query, key and value are [T/cp, heads/tp, d].

    Under context parallelism, a rank holds the queries for its own consecutive tokens and gathers all keys and values;
    their gradients are reduce-scattered. Exchanging heads for tokens would require cp to divide the number of heads per
    tensor-parallel rank, but Z-Image has 30 heads, 15 with tp=2. The price is memory: each layer keeps the keys and
    values of all T tokens for its backward pass, 2·T·hidden/tp elements, regardless of cp. With full recompute, only
    one layer keeps them at a time.
    """

    def __init__(self, config: TransformerConfig, **_):
        super().__init__()
        assert config.kv_channels is not None, "Megatron has not derived kv_channels"
        self.scale = 1 / math.sqrt(config.kv_channels)
        self.context_group = parallel.context_group()

    def forward(self, query, key, value, *_, packed_seq_params: DocumentStream, **__):
        if packed_seq_params.rotations is not None:
            query, key = (_rotated(x, packed_seq_params.rotations) for x in (query, key))
        key, value = (gather_from_sequence_parallel_region(x, group=self.context_group) for x in (key, value))
        lengths, query_lengths = packed_seq_params.lengths, packed_seq_params.query_lengths
        return full_attention(query, key, value, lengths, self.scale, query_lengths).flatten(1)


def _rotated(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighboring channels of [n, heads, d] in float32. Megatron's function takes several passes over
    the heads, and keeps cosines and sines in every layer."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(heads.dtype)


Scaling = Callable[[torch.Tensor], torch.Tensor]
"""Function that scales tokens, [T/cp, 1, hidden]."""


class SandwichLayer(TransformerLayer):
    """A layer with norms before and after both the attention and the MLP: x + norm(attention(norm(x)))."""

    input_layernorm: Any
    self_attention: Any
    pre_mlp_layernorm: Any
    mlp: Any

    def __init__(self, config: TransformerConfig, **options: Any):
        super().__init__(config, **options)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm, self.post_mlp_layernorm = RMSNorm(config, size, eps), RMSNorm(config, size, eps)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # Megatron passes these arguments by keyword
        self,
        hidden_states: torch.Tensor,
        *,
        context: torch.Tensor | None,
        packed_seq_params: DocumentStream,
        **_,
    ):
        """Return the hidden states, [T/cp, 1, hidden], and the context, which Megatron passes to the next layer.

        Args:
            context: [D, conditioning], the documents' embedded noise levels. Megatron preserves this argument's
                gradient if the layer is recomputed.
        """
        scale_attention, gate_attention, scale_mlp, gate_mlp = self._modulation(context, packed_seq_params)
        out, _ = self.self_attention(
            scale_attention(self.input_layernorm(hidden_states)),
            attention_mask=None,
            packed_seq_params=packed_seq_params,
        )
        hidden_states = hidden_states + gate_attention(self.post_attention_layernorm(out))
        mlp = partial(checkpoint, self.mlp, False) if self.recompute_mlp and self.training else self.mlp
        out, _ = mlp(scale_mlp(self.pre_mlp_layernorm(hidden_states)))
        return hidden_states + gate_mlp(self.post_mlp_layernorm(out)), context

    def _modulation(self, context: torch.Tensor | None, stream: DocumentStream) -> Sequence[Scaling]:
        """Return the functions that scale the attention's input and output, then those for the MLP's input and
        output."""
        return [_unchanged] * 4


class ModulatedLayer(SandwichLayer):
    """A SandwichLayer that scales inputs and outputs by functions of the noise level."""

    def __init__(self, config: TransformerConfig, conditioning: int, **options: Any):
        super().__init__(config, **options)
        self.modulation = torch.nn.Linear(conditioning, 4 * config.hidden_size, dtype=config.params_dtype)
        for parameter in self.modulation.parameters():
            parallel.mark(parameter, sequence_parallel=config.sequence_parallel)

    def _modulation(self, context: torch.Tensor | None, stream: DocumentStream) -> Sequence[Scaling]:
        assert context is not None, "a modulated layer has no noise levels"
        attention_scale, attention_gate, mlp_scale, mlp_gate = self.modulation(context).chunk(4, dim=-1)
        factors = (1 + attention_scale, attention_gate.tanh(), 1 + mlp_scale, mlp_gate.tanh())
        return [partial(modulate, numbers=stream.document_numbers, scale=factor) for factor in factors]


def _unchanged(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


def layer_spec(conditioning: int | None) -> ModuleSpec:
    """Return the spec for a layer. `conditioning` is the number of channels of the embedded noise level; None for a
    layer that does not depend on it."""
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.sharded_state_dict_keys_map = {}  # Transformer Engine cannot fuse norms before a modulation
    attention = layer.submodules.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.k_layernorm = FullAttention, RMSNorm, RMSNorm
    if conditioning is None:
        return ModuleSpec(SandwichLayer, submodules=layer.submodules)
    return ModuleSpec(ModulatedLayer, params={"conditioning": conditioning}, submodules=layer.submodules)
