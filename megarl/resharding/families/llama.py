"""Llama (SmolLM2 too), and Qwen2, which adds biases to queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from megarl.resharding.families.family import Family
from megarl.resharding.families.tiling import Grouped, Heads, Split, Whole

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_QKV = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
_QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_ATTENTION_OUT = ("self_attn.o_proj.weight",)
_MLP_OUT = ("mlp.down_proj.weight",)

LLAMA = Family(
    tensors={
        "input_layernorm.weight": ("hidden",),
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("key", "hidden"),
        "self_attn.v_proj.weight": ("key", "hidden"),
        "self_attn.o_proj.weight": ("hidden", "query"),
        "post_attention_layernorm.weight": ("hidden",),
        "mlp.gate_proj.weight": ("intermediate", "hidden"),
        "mlp.up_proj.weight": ("intermediate", "hidden"),
        "mlp.down_proj.weight": ("hidden", "intermediate"),
    },
    megatron={
        "input_layernorm.weight": Whole(_NORMS[:1]),
        "self_attention.linear_qkv.weight": Grouped(_QKV),
        "self_attention.linear_proj.weight": Split(_ATTENTION_OUT, axis=1),
        "pre_mlp_layernorm.weight": Whole(_NORMS[1:]),
        "mlp.linear_fc1.weight": Split(_GATE_UP),
        "mlp.linear_fc2.weight": Split(_MLP_OUT, axis=1),
    },
    megatron_fused_norms={
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    },
    vllm={
        "input_layernorm.weight": Whole(_NORMS[:1]),
        "self_attn.qkv_proj.weight": Heads(_QKV),
        "self_attn.o_proj.weight": Split(_ATTENTION_OUT, axis=1),
        "post_attention_layernorm.weight": Whole(_NORMS[1:]),
        "mlp.gate_up_proj.weight": Split(_GATE_UP),
        "mlp.down_proj.weight": Split(_MLP_OUT, axis=1),
    },
    unsupported=("attention_bias", "mlp_bias"),
)

QWEN2 = replace(
    LLAMA,
    tensors={**LLAMA.tensors, **dict(zip(_QKV_BIAS, [("query",), ("key",), ("key",)], strict=True))},
    megatron={**LLAMA.megatron, "self_attention.linear_qkv.bias": Grouped(_QKV_BIAS)},
    vllm={**LLAMA.vllm, "self_attn.qkv_proj.bias": Heads(_QKV_BIAS)},
)
