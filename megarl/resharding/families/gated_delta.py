"""Gated delta net layers in Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from megarl.models.shape import ModelShape
from megarl.resharding.families.attention import NORM as ATTENTION_NORM
from megarl.resharding.families.part import Part, norm, renamed
from megarl.resharding.families.tiling import Fused, Split, Tiling, Ungrouped

_QKV, _Z, _B, _A, _QKVZ, _BA = (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a", "qkvz", "ba"))
_A_LOG, _DT_BIAS, _NORM, _OUT, _CONVOLUTION = (
    f"linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight", "conv1d.weight")
)
_CHANNELS = ("linear.keys", "linear.keys", "linear.values")

[_INPUT] = ATTENTION_NORM.tensors
NORM = norm(_INPUT, "hidden", _INPUT, "self_attention.in_proj.layer_norm_weight")


def _split(tensors: tuple[str, ...], *parts: tuple[str, ...]) -> Tiling:
    return Fused(tensors=tensors, tiling=Split(()), parts=parts)


# In Megatron, one projection computes a rank's queries, keys, values, gates, step sizes and decays.
PROJECTIONS = Part(
    tensors={
        _QKV: ("linear.channels", "hidden"),
        _Z: ("linear.values", "hidden"),
        _B: ("linear.value_heads", "hidden"),
        _A: ("linear.value_heads", "hidden"),
    },
    megatron={
        "self_attention.in_proj.weight": _split(
            (_QKV, _Z, _B, _A), _CHANNELS, ("linear.values",), ("linear.value_heads",), ("linear.value_heads",)
        )
    },
    vllm={_QKVZ: _split((_QKV, _Z), _CHANNELS, ("linear.values",)), _BA: Split((_B, _A))},
)
GROUPED_PROJECTIONS = Part(
    tensors={_QKVZ: ("linear.projected", "hidden"), _BA: ("linear.per_token", "hidden")},
    megatron={
        "self_attention.in_proj.weight": Ungrouped(
            tensors=(_QKVZ, _BA),
            heads="linear.key_heads",
            parts=(
                ("linear.key_dim", "linear.key_dim", "linear.value_rows_per_key", "linear.value_rows_per_key"),
                ("linear.value_heads_per_key", "linear.value_heads_per_key"),
            ),
        )
    },
    vllm={_QKVZ: Split((_QKVZ,)), _BA: Split((_BA,))},
)
_CHANNEL_SHARE = _split((_CONVOLUTION,), _CHANNELS)
STATE = (
    Part(
        tensors={_CONVOLUTION: ("linear.channels", "linear.unconvolved", "linear.width")},
        megatron={"self_attention.conv1d.weight": _CHANNEL_SHARE},
        vllm={_CONVOLUTION: _CHANNEL_SHARE},
    ),
    # float32, because the decay is exp(-exp(A_log) · …): rounding A_log to bfloat16 changes log-probs by 1e-3 or more.
    renamed(_A_LOG, ("linear.value_heads",), "self_attention.A_log", Split((_A_LOG,)), float32=(_A_LOG,)),
    renamed(_DT_BIAS, ("linear.value_heads",), "self_attention.dt_bias", Split((_DT_BIAS,))),
    renamed(_NORM, ("linear.value_dim",), "self_attention.out_norm.weight"),
    renamed(_OUT, ("hidden", "linear.values"), "self_attention.out_proj.weight", Split((_OUT,), axis=1)),
)


def gated_delta_parts(model: ModelShape) -> list[Part]:
    assert model.linear is not None
    return [NORM, GROUPED_PROJECTIONS if model.linear.is_grouped else PROJECTIONS, *STATE]
