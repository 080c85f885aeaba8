"""Multi-head latent attention in DeepSeek-V3 and Kimi K2."""

from __future__ import annotations

from megarl.models.shape import ModelShape
from megarl.resharding.families import attention
from megarl.resharding.families.part import Part, norm, renamed
from megarl.resharding.families.tiling import Split, Whole

_Q, _Q_DOWN, _Q_UP = (f"self_attn.{name}.weight" for name in ("q_proj", "q_a_proj", "q_b_proj"))
_KV_DOWN, _KV_UP = (f"self_attn.{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_b_proj"))
_OUT = "self_attn.o_proj.weight"

NORM = Part(attention.NORM.tensors, attention.NORM.megatron, attention.NORM.vllm)
DIRECT_QUERY = (
    renamed(_Q, ("query", "hidden"), "self_attention.linear_q_proj.weight", Split((_Q,))),
    renamed(_KV_DOWN, ("latent_and_position", "hidden"), "self_attention.linear_kv_down_proj.weight"),
)
LATENT_QUERY = (
    Part(
        tensors={_Q_DOWN: ("latent.query_rank", "hidden"), _KV_DOWN: ("latent_and_position", "hidden")},
        megatron={
            "self_attention.linear_q_down_proj.weight": Whole((_Q_DOWN,)),
            "self_attention.linear_kv_down_proj.weight": Whole((_KV_DOWN,)),
        },
        vllm={"self_attn.fused_qkv_a_proj.weight": Whole((_Q_DOWN, _KV_DOWN))},
    ),
    norm(
        "self_attn.q_a_layernorm.weight",
        "latent.query_rank",
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    renamed(_Q_UP, ("query", "latent.query_rank"), "self_attention.linear_q_up_proj.weight", Split((_Q_UP,))),
)
KEYS_AND_VALUES = (
    norm(
        "self_attn.kv_a_layernorm.weight",
        "latent.kv_rank",
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    renamed(
        _KV_UP,
        ("latent_keys_and_values", "latent.kv_rank"),
        "self_attention.linear_kv_up_proj.weight",
        Split((_KV_UP,)),
    ),
    renamed(_OUT, ("hidden", "value"), "self_attention.linear_proj.weight", Split((_OUT,), axis=1)),
)


def latent_attention_parts(model: ModelShape) -> list[Part]:
    assert model.latent is not None
    return [NORM, *(DIRECT_QUERY if model.latent.query_rank is None else LATENT_QUERY), *KEYS_AND_VALUES]
