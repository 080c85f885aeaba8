"""The supported model families, and transformers' defaults for keys that their config.json omits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.errors import UserError

_ANY = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

_QWEN3_EXPERTS = _ANY | {"decoder_sparse_step": 1, "mlp_only_layers": None}

_GATED_DELTA = _ANY | {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "output_gate_type": "silu",
    "partial_rotary_factor": 0.25,
}
"""Defaults of models with gated delta net layers."""

_GATED_DELTA_EXPERTS = _GATED_DELTA | {
    "moe_intermediate_size": 512,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}

_DEEPSEEK = _ANY | {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _ANY
    | {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "gpt_oss": _ANY
    | {
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": None,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "kimi_k2": _DEEPSEEK,
    "llama": _ANY,
    "mistral": _ANY | {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _ANY
    | {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_jitter_noise": 0.0,
    },
    "phi3": _ANY | {"resid_pdrop": 0.0, "rms_norm_eps": 1e-5},
    "qwen2": _ANY | {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
    "qwen2_5_vl_text": _ANY
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "qwen3": _ANY | {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3_moe": _QWEN3_EXPERTS
    | {
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "qwen3_vl_text": _ANY | {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500000.0},
    "qwen3_vl_moe_text": _QWEN3_EXPERTS
    | {
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
    },
    "qwen3_5_text": _GATED_DELTA | {"num_key_value_heads": 4},
    # Every layer has experts, so config.json has no size of a dense MLP.
    "qwen3_5_moe_text": _GATED_DELTA_EXPERTS | {"intermediate_size": 0, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_next": _GATED_DELTA_EXPERTS
    | {
        "decoder_sparse_step": 1,
        "intermediate_size": 5632,
        "mlp_only_layers": None,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
}
"""Supported `model_type` -> transformers' defaults for keys that config.json omits."""

TEXT_MODELS: Mapping[str, str] = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""`model_type` of a multimodal model -> the class of its text model. Text models of other families have no class of
their own in vLLM."""

TRANSFORMERS_TYPES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Supported `model_type` that transformers lacks -> the type of the same architecture in transformers."""


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with defaults for the keys that config.json omits. Raise a UserError if the model family is not
    supported. The message lists the supported families."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"model_type {model_type} is not supported. Fix: use a model of type {', '.join(FAMILIES)}")
    return {**FAMILIES[model_type], **hf_config}
