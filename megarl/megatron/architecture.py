"""From a Hugging Face config to the fields of Megatron's TransformerConfig that describe the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megarl.config.huggingface import completed
from megarl.resharding.families.shape import ModelShape


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what the config asks for and is not done here."""
    shape, model = ModelShape.of(hf_config), completed(hf_config)
    return dict(
        **_experts(shape, model),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        layernorm_epsilon=model["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        # On every linear layer; the layer specification takes them away again where the model has none.
        add_bias_linear=shape.attention_out_bias or shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _experts(shape: ModelShape, model: Mapping[str, Any]) -> dict[str, Any]:
    """No auxiliary loss unless asked for: it is not linear in microbatches, and the objective does not know of it."""
    if shape.experts is None:
        return {}
    return dict(
        num_moe_experts=shape.experts.count,
        moe_ffn_hidden_size=shape.experts.intermediate,
        moe_layer_freq=[int(mixed) for mixed in shape.experts.layers],
        moe_router_topk=shape.experts.active,
        # Weights that add up to one are the same as a softmax over the chosen experts only.
        moe_router_pre_softmax=not model.get("norm_topk_prob", True),
    )
