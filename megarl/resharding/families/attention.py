"""Grouped-query attention in Llama, Mistral, Phi-3, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.shape import ModelShape
from megarl.resharding.families.part import Part
from megarl.resharding.families.tiling import Fused, Grouped, Heads, Split, Whole

_QKV = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
_QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
_FUSED, _QKV_ROWS = "self_attn.qkv_proj.weight", ("query", "key", "key")
_NORM = Whole(("input_layernorm.weight",))

NORM = Part(
    tensors={"input_layernorm.weight": ("hidden",)},
    megatron={"input_layernorm.weight": _NORM},
    transformer_engine={"self_attention.linear_qkv.layer_norm_weight": _NORM},
    vllm={"input_layernorm.weight": _NORM},
)
WEIGHTS = Part(
    tensors={
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("key", "hidden"),
        "self_attn.v_proj.weight": ("key", "hidden"),
        "self_attn.o_proj.weight": ("hidden", "query"),
    },
    megatron={
        "self_attention.linear_qkv.weight": Grouped(_QKV),
        "self_attention.linear_proj.weight": Split(("self_attn.o_proj.weight",), axis=1),
    },
    vllm={
        "self_attn.qkv_proj.weight": Heads(_QKV),
        "self_attn.o_proj.weight": Split(("self_attn.o_proj.weight",), axis=1),
    },
)
FUSED_WEIGHTS = replace(
    WEIGHTS,
    tensors={_FUSED: (_QKV_ROWS, "hidden"), "self_attn.o_proj.weight": ("hidden", "query")},
    megatron=WEIGHTS.megatron
    | {"self_attention.linear_qkv.weight": Fused(tensors=(_FUSED,), tiling=Grouped(()), parts=_QKV_ROWS)},
    vllm=WEIGHTS.vllm | {_FUSED: Fused(tensors=(_FUSED,), tiling=Heads(()), parts=_QKV_ROWS)},
)
QKV_BIAS = Part(
    tensors=dict(zip(_QKV_BIAS, [("query",), ("key",), ("key",)], strict=True)),
    megatron={"self_attention.linear_qkv.bias": Grouped(_QKV_BIAS)},
    vllm={"self_attn.qkv_proj.bias": Heads(_QKV_BIAS)},
)
OUT_BIAS = Part(
    tensors={"self_attn.o_proj.bias": ("hidden",)},
    megatron={"self_attention.linear_proj.bias": Whole(("self_attn.o_proj.bias",))},
    vllm={"self_attn.o_proj.bias": Whole(("self_attn.o_proj.bias",))},
)
QK_NORM = Part(
    tensors={"self_attn.q_norm.weight": ("head_dim",), "self_attn.k_norm.weight": ("head_dim",)},
    megatron={
        "self_attention.q_layernorm.weight": Whole(("self_attn.q_norm.weight",)),
        "self_attention.k_layernorm.weight": Whole(("self_attn.k_norm.weight",)),
    },
    vllm={
        "self_attn.q_norm.weight": Whole(("self_attn.q_norm.weight",)),
        "self_attn.k_norm.weight": Whole(("self_attn.k_norm.weight",)),
    },
)


def attention_parts(model: ModelShape) -> list[Part]:
    optional = ((model.qkv_bias, QKV_BIAS), (model.attention_out_bias, OUT_BIAS), (model.qk_norm, QK_NORM))
    return [NORM, FUSED_WEIGHTS if model.fused else WEIGHTS, *(part for present, part in optional if present)]
