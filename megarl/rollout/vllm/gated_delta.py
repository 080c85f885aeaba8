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

Cache = tuple[torch.Tensor, torch.Tensor]
"""Inputs of the convolution, [slots, width − 1 + draft tokens, channels], and recurrent states, [slots, value heads,
keys, values]."""

RuleInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys, values, decays and step sizes."""


def install() -> None:
    """Replace the kernels. Must run before the model is built, when vLLM registers the operator."""
    cpu_attention.cpu_gdn_attention_core = attention_core


def attention_core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Write the attention outputs, [T, value heads, values], to core_attn_out, and update the states of the requests.

    Args:
        mixed_qkv: [T, channels], queries, keys and values before the convolution.
        b, a: [T, value heads], the logit of the step size, and the input of the decay.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM runs a dummy step to measure activation memory
        return
    assert isinstance(context.attn_metadata, dict), "microbatches run on GPU only"
    metadata: Any = context.attn_metadata[layer.prefix]  # a GDNAttentionMetadata
    if metadata.num_actual_tokens == 0:
        return
    convolution, states = layer.kv_cache
    if is_conv_state_dim_first():
        convolution = convolution.transpose(1, 2)
    # Only this function uses the states. It stores them as [keys, values], but vLLM allocates [values, keys].
    cache = convolution, states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)
    if metadata.spec_sequence_masks is None:
        tokens = slice(int(metadata.non_spec_query_start_loc[metadata.num_decodes + metadata.num_prefills]))
        core_attn_out[tokens] = _extend(layer, cache, metadata, mixed_qkv[tokens], b[tokens], a[tokens])
        return
    tokens = metadata.spec_token_indx.long()
    core_attn_out[tokens] = _verify(layer, cache, metadata, mixed_qkv[tokens], b[tokens], a[tokens])
    if len(tokens := metadata.non_spec_token_indx.long()):
        core_attn_out[tokens] = _extend(layer, cache, metadata, mixed_qkv[tokens], b[tokens], a[tokens])


def _extend(
    layer: Any, cache: Cache, metadata: Any, inputs: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    """Process requests without draft tokens, and update their states. Return the outputs, [T, value heads, values]."""
    convolution, states = cache
    count, width = metadata.num_decodes + metadata.num_prefills, layer.conv1d.weight.shape[-1]
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    bounds = metadata.non_spec_query_start_loc[: count + 1]
    continues = torch.arange(count) < metadata.num_decodes
    if metadata.has_initial_state is not None:
        continues = continues | metadata.has_initial_state[:count]
    history = convolution[slots, : width - 1] * continues[:, None, None]
    rule = _rule_inputs(layer, packed_convolution(inputs, layer.conv1d.weight[:, 0], bounds, history), b, a)
    convolution[slots, : width - 1] = torch.stack([rows[1 - width :] for rows in _joined(history, inputs, bounds)])
    out, after = gated_delta_rule(*rule, bounds, states[slots] * continues[:, None, None, None])
    states[slots] = after.to(states.dtype)
    return out


def _verify(
    layer: Any, cache: Cache, metadata: Any, inputs: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    """Process the last token and the draft tokens of each request. How many drafts are accepted is known only in the
    next step. Each token's state is therefore kept in a separate slot, and the convolution inputs of all tokens in the
    first slot. Return the outputs, [T, value heads, values]."""
    convolution, states = cache
    count, width = metadata.num_spec_decodes, layer.conv1d.weight.shape[-1]
    slots, bounds = metadata.spec_state_indices_tensor[:count].long(), metadata.spec_query_start_loc[: count + 1].long()
    last = metadata.num_accepted_tokens[:count].long() - 1
    history = convolution[slots[:, :1], last[:, None] + torch.arange(width - 1)]
    rule = _rule_inputs(layer, packed_convolution(inputs, layer.conv1d.weight[:, 0], bounds, history), b, a)
    for slot, rows in zip(slots[:, 0], _joined(history, inputs, bounds), strict=True):
        convolution[slot, : len(rows) - 1] = rows[1:]
    current, lengths = states[slots.gather(1, last[:, None])[:, 0]].float(), bounds.diff()
    out = inputs.new_empty(len(inputs), *states.shape[1:2], layer.head_v_dim)
    for turn in range(int(lengths.max())):
        requests = (lengths > turn).nonzero()[:, 0]
        tokens, each = bounds[requests] + turn, torch.arange(len(requests) + 1)
        query, key, value, decay, beta = (x[tokens] for x in rule)
        out[tokens], after = gated_delta_rule(query, key, value, decay, beta, each, current[requests])
        current[requests] = after
        states[slots[requests, turn]] = after.to(states.dtype)
    return out


def _rule_inputs(layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> RuleInputs:
    """Return the inputs of `gated_delta_rule`, given the convolution's output."""
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    sizes = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    query, key, value = (
        x.unflatten(1, (-1, size)) for x, size in zip(mixed.split((keys, keys, values), 1), sizes, strict=True)
    )
    copies = value.shape[1] // key.shape[1]
    query, key = (normalized(x.float()).repeat_interleave(copies, 1) for x in (query, key))
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    return query, key, value, decay, b.float().sigmoid()


def _joined(history: torch.Tensor, inputs: torch.Tensor, bounds: torch.Tensor) -> list[torch.Tensor]:
    """Return the preceding and the new inputs of each request, [width − 1 + tokens, channels]."""
    requests = inputs.split(bounds.diff().tolist())
    return [torch.cat((old, new)) for old, new in zip(history, requests, strict=True)]
