"""Gated delta net layers in vLLM's CPU build, in plain torch.

vLLM's own CPU kernels support only bfloat16 and heads with 64 or 128 channels. They also require a packed convolution,
so that refits could not write its weight in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as cpu_attention
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from megarl.ops.gated_delta import gated_delta_rule, normalized, packed_convolution


def install() -> None:
    """Replace the kernels. Must run before the model is built, when vLLM registers the operator."""
    cpu_attention.cpu_gdn_attention_core = attention_core


def attention_core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Write the attention outputs, [T, value heads, values], to core_attn_out, and update the states of the requests.

    Args:
        mixed_qkv: [T, channels], queries, keys and values before the convolution.
        b, a: [T, value heads], logits of the step size, and the input of the decay.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures the memory that activations need
        return
    assert isinstance(context.attn_metadata, dict), "microbatches run on GPU only"
    metadata: Any = context.attn_metadata[layer.prefix]  # a GDNAttentionMetadata
    if metadata.num_actual_tokens == 0:
        return
    assert metadata.spec_sequence_masks is None, "speculative decoding needs a state for each draft token"
    count = metadata.num_decodes + metadata.num_prefills
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    bounds = metadata.non_spec_query_start_loc[: count + 1]
    continues = torch.arange(count) < metadata.num_decodes
    if metadata.has_initial_state is not None:
        continues = continues | metadata.has_initial_state[:count]
    tokens = slice(int(bounds[-1]))
    convolution, states = layer.kv_cache
    if is_conv_state_dim_first():
        convolution = convolution.transpose(1, 2)
    inputs, history = mixed_qkv[tokens], convolution[slots] * continues[:, None, None]
    mixed = packed_convolution(inputs, layer.conv1d.weight[:, 0], bounds, history)
    convolution[slots] = _last_inputs(inputs, history, bounds)
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    sizes = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    query, key, value = (
        x.unflatten(1, (-1, size)) for x, size in zip(mixed.split((keys, keys, values), 1), sizes, strict=True)
    )
    copies = value.shape[1] // key.shape[1]
    query, key = (normalized(x.float()).repeat_interleave(copies, 1) for x in (query, key))
    decay = -layer.A_log.float().exp() * F.softplus(a[tokens].float() + layer.dt_bias.float())
    # The cache belongs to this function, which stores [keys, values] where vLLM's shape has [values, keys].
    states = states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)
    before = states[slots] * continues[:, None, None, None]
    out, after = gated_delta_rule(query, key, value, decay, b[tokens].float().sigmoid(), bounds, before)
    states[slots] = after.to(states.dtype)
    core_attn_out[tokens] = out


def _last_inputs(inputs: torch.Tensor, history: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the inputs that precede each request's next token, [D, width − 1, channels]."""
    requests = inputs.split(bounds.diff().tolist())
    width = history.shape[1]
    return torch.stack([torch.cat((old, new))[-width:] for old, new in zip(history, requests, strict=True)])
