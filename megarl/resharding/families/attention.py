"""Grouped-query attention in Llama, Mistral, Phi-3, Qwen, GLM-4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.shape import ModelShape
from megarl.resharding.families.part import Part, norm, renamed
from megarl.resharding.families.tiling import Fused, GatedGroups, Grouped, Heads, Split

_QKV = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
_QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
_FUSED, _QKV_ROWS = "self_attn.qkv_proj.weight", ("query", "key", "key")

_NORM = "input_layernorm.weight"
NORM = norm(_NORM, "hidden", _NORM, "self_attention.linear_qkv.layer_norm_weight")
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
    megatron={
        **WEIGHTS.megatron,
        "self_attention.linear_qkv.weight": Fused(tensors=(_FUSED,), tiling=Grouped(()), parts=(_QKV_ROWS,)),
    },
    vllm={**WEIGHTS.vllm, _FUSED: Fused(tensors=(_FUSED,), tiling=Heads(()), parts=(_QKV_ROWS,))},
)
GATED_WEIGHTS = replace(
    WEIGHTS,
    tensors={**WEIGHTS.tensors, "self_attn.q_proj.weight": ("gated_query", "hidden")},
    megatron={**WEIGHTS.megatron, "self_attention.linear_qkv.weight": GatedGroups(_QKV)},
)
QKV_BIAS = Part(
    tensors=dict(zip(_QKV_BIAS, [("query",), ("key",), ("key",)], strict=True)),
    megatron={"self_attention.linear_qkv.bias": Grouped(_QKV_BIAS)},
    vllm={"self_attn.qkv_proj.bias": Heads(_QKV_BIAS)},
)
OUT_BIAS = renamed("self_attn.o_proj.bias", ("hidden",), "self_attention.linear_proj.bias")
SINKS = renamed(
    "self_attn.sinks", ("heads",), "self_attention.core_attention.softmax_offset", Split(("self_attn.sinks",))
)
QK_NORMS = [renamed(f"self_attn.{x}_norm.weight", ("head_dim",), f"self_attention.{x}_layernorm.weight") for x in "qk"]


def attention_parts(model: ModelShape) -> list[Part]:
    optional = (
        *((model.qkv_bias, [QKV_BIAS]), (model.attention_out_bias, [OUT_BIAS]), (model.has_sinks, [SINKS])),
        (model.qk_norm, QK_NORMS),
    )
    present = (part for is_present, parts in optional if is_present for part in parts)
    weights = GATED_WEIGHTS if model.has_output_gate else FUSED_WEIGHTS if model.fused else WEIGHTS
    return [NORM, weights, *present]
