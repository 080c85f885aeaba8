"""Mixture-of-experts layers in Mixtral, Qwen, GLM-4.5, DeepSeek-V3, Kimi K2 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.shape import ModelShape
from megarl.resharding.families import mlp
from megarl.resharding.families.part import Part, renamed
from megarl.resharding.families.tiling import OnFirstRank, Split, Whole

# Transformer Engine does not fuse the norm into the router.
NORM = replace(mlp.NORM, transformer_engine=None)


def routed(prefix: str, gate: str, up: str, down: str) -> tuple[Part, Part]:
    """Return the parts for the router and the experts, given the names of their projections."""
    router = renamed(f"{prefix}.gate.weight", ("experts.count", "hidden"), "mlp.router.weight", quantized=False)
    rows = tuple(f"{prefix}.experts.{{}}.{name}.weight" for name in (gate, up))
    columns = (f"{prefix}.experts.{{}}.{down}.weight",)
    into, out = Split(rows), Split(columns, axis=1)
    experts = Part(
        tensors={
            **dict.fromkeys(rows, ("experts.intermediate", "hidden")),
            **dict.fromkeys(columns, ("hidden", "experts.intermediate")),
        },
        megatron={
            "mlp.experts.local_experts.{}.linear_fc1.weight": into,
            "mlp.experts.local_experts.{}.linear_fc2.weight": out,
        },
        transformer_engine={"mlp.experts.linear_fc1.weight{}": into, "mlp.experts.linear_fc2.weight{}": out},
        # In this table, the first two axes of vLLM's parameters [experts, rows, columns] are flattened.
        vllm={
            f"{prefix}.experts.routed_experts.w13_weight": into,
            f"{prefix}.experts.routed_experts.w2_weight": replace(out, along=0),
        },
        per_expert=True,
    )
    return router, experts


_INTO, _OUT = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate_up", "down"))
_STACKED, _TORCH, _FUSED = "mlp.experts.routed_experts", "mlp.experts.local_experts.{}", "mlp.experts"


def _interleaved() -> tuple[Part, ...]:
    """Return gpt-oss's parts. Trainer and engine keep gate and up rows interleaved. The trainer does not split an
    expert over ranks, so its output bias is added only once."""
    into, into_bias = Split((f"{_INTO}.weight",)), Split((f"{_INTO}.bias",))
    out, out_bias = Split((f"{_OUT}.weight",), axis=1), Whole((f"{_OUT}.bias",))
    router = [
        renamed("mlp.router.weight", ("experts.count", "hidden"), "mlp.router.weight", quantized=False),
        renamed("mlp.router.bias", ("experts.count",), "mlp.router.bias"),
    ]
    experts = Part(
        tensors={
            f"{_INTO}.weight": ("experts.gate_and_up", "hidden"),
            f"{_INTO}.bias": ("experts.gate_and_up",),
            f"{_OUT}.weight": ("hidden", "experts.intermediate"),
            f"{_OUT}.bias": ("hidden",),
        },
        megatron={
            f"{_TORCH}.linear_fc1.weight": into,
            f"{_TORCH}.linear_fc1.bias": into_bias,
            f"{_TORCH}.linear_fc2.weight": out,
            f"{_TORCH}.linear_fc2.bias": out_bias,
        },
        transformer_engine={
            f"{_FUSED}.linear_fc1.weight{{}}": into,
            f"{_FUSED}.linear_fc1.bias{{}}": into_bias,
            f"{_FUSED}.linear_fc2.weight{{}}": out,
            f"{_FUSED}.linear_fc2.bias{{}}": out_bias,
        },
        vllm={
            f"{_STACKED}.w13_weight": into,
            f"{_STACKED}.w13_bias": into_bias,
            f"{_STACKED}.w2_weight": replace(out, along=0),
            f"{_STACKED}.w2_bias": OnFirstRank((f"{_OUT}.bias",)),
        },
        per_expert=True,
    )
    return NORM, *router, experts


GPT_OSS = _interleaved()
MIXTRAL = (NORM, *routed("block_sparse_moe", "w1", "w3", "w2"))
QWEN3 = (NORM, *routed("mlp", "gate_proj", "up_proj", "down_proj"))


_BIAS, _SHARED_GATE = "mlp.gate.e_score_correction_bias", "mlp.shared_expert_gate.weight"


def shared(prefix: str) -> Part:
    """Return the part for the shared experts, given the prefix of their projections."""
    *into, out = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))
    rows, columns = Split(tuple(into)), Split((out,), axis=1)
    sizes = ("experts.shared_intermediate", "hidden")
    return Part(
        tensors={**dict.fromkeys(into, sizes), out: sizes[::-1]},
        megatron={"mlp.shared_experts.linear_fc1.weight": rows, "mlp.shared_experts.linear_fc2.weight": columns},
        vllm={f"{prefix}.gate_up_proj.weight": rows, f"{prefix}.down_proj.weight": columns},
    )


SHARED = shared("mlp.shared_experts")
GATED_SHARED = (
    shared("mlp.shared_expert"),
    renamed(_SHARED_GATE, ("experts.gates", "hidden"), "mlp.shared_experts.gate_weight", quantized=False),
)
ROUTER_BIAS = renamed(_BIAS, ("experts.count",), "mlp.router.expert_bias", float32=(_BIAS,))


def expert_parts(model: ModelShape) -> tuple[Part, ...]:
    assert model.experts is not None
    if model.experts.is_interleaved:
        return GPT_OSS
    if model.model_type == "mixtral":
        return MIXTRAL
    norm, router, experts = QWEN3
    parts = [norm, replace(router, engine_float32=True) if model.model_type == "glm4_moe" else router, experts]
    parts += [ROUTER_BIAS] if model.experts.has_selection_bias else []
    if model.experts.has_shared_gate:
        return (*parts, *GATED_SHARED)
    return (*parts, SHARED) if model.experts.shared_intermediate else tuple(parts)
