"""From a Hugging Face config to the fields of Megatron's TransformerConfig that describe the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megarl.resharding.families.shape import ModelShape


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    shape = ModelShape.of(hf_config)
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        layernorm_epsilon=hf_config["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """The rotary base; newer Hugging Face configs keep it in rope_parameters."""
    parameters = hf_config.get("rope_parameters") or {}
    return parameters.get("rope_theta") or hf_config.get("rope_theta", 10000.0)
