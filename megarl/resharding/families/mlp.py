"""Dense gated MLP layers and their input norm."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.shape import ModelShape
from megarl.resharding.families.part import Part, norm
from megarl.resharding.families.tiling import Fused, Split, Whole

_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_GATE_UP_BIAS = ("mlp.gate_proj.bias", "mlp.up_proj.bias")
_FUSED, _ROWS = "mlp.gate_up_proj.weight", ("intermediate", "intermediate")

NORM = norm("post_attention_layernorm.weight", "hidden", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
WEIGHTS = Part(
    tensors={
        "mlp.gate_proj.weight": ("intermediate", "hidden"),
        "mlp.up_proj.weight": ("intermediate", "hidden"),
        "mlp.down_proj.weight": ("hidden", "intermediate"),
    },
    megatron={
        "mlp.linear_fc1.weight": Split(_GATE_UP),
        "mlp.linear_fc2.weight": Split(("mlp.down_proj.weight",), axis=1),
    },
    vllm={"mlp.gate_up_proj.weight": Split(_GATE_UP), "mlp.down_proj.weight": Split(("mlp.down_proj.weight",), axis=1)},
)
_FUSED_GATE_UP = Fused(tensors=(_FUSED,), tiling=Split(()), parts=(_ROWS,))
FUSED_WEIGHTS = replace(
    WEIGHTS,
    tensors={_FUSED: (_ROWS, "hidden"), "mlp.down_proj.weight": ("hidden", "intermediate")},
    megatron={**WEIGHTS.megatron, "mlp.linear_fc1.weight": _FUSED_GATE_UP},
    vllm={**WEIGHTS.vllm, _FUSED: _FUSED_GATE_UP},
)
BIAS = Part(
    tensors={
        "mlp.gate_proj.bias": ("intermediate",),
        "mlp.up_proj.bias": ("intermediate",),
        "mlp.down_proj.bias": ("hidden",),
    },
    megatron={"mlp.linear_fc1.bias": Split(_GATE_UP_BIAS), "mlp.linear_fc2.bias": Whole(("mlp.down_proj.bias",))},
    vllm={"mlp.gate_up_proj.bias": Split(_GATE_UP_BIAS), "mlp.down_proj.bias": Whole(("mlp.down_proj.bias",))},
)


def mlp_parts(model: ModelShape) -> list[Part]:
    return [NORM, FUSED_WEIGHTS if model.fused else WEIGHTS, *([BIAS] if model.mlp_bias else [])]
