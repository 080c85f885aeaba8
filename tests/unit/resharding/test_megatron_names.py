"""Compare names and shapes declared by megatron_holder with the GPTModel that a rank actually builds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from megarl.config.model_schema import Layout
from megarl.megatron.model.layer_spec import uses_transformer_engine
from megarl.models.mtp import add_mtp
from megarl.resharding.families import megatron_holder
from megarl.resharding.piece import Holder
from tests.paths import ROOT
from tests.published_models import CONFIGS
from tests.unit.resharding.cases import BIASED, GPT_OSS, LATENT, config_of, gated_delta_sizes, layout_of
from tests.unit.resharding.megatron_world import real_rank

MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "mlp_only_layers": [1],
}
DEEPSEEK = {
    **LATENT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "q_lora_rank": 4,
    "moe_intermediate_size": 6,
    "rms_norm_eps": 1e-6,
}
GLM = {**BIASED, "model_type": "glm4_moe", "moe_intermediate_size": 6, "head_dim": 4}
QWEN3_NEXT = {
    **gated_delta_sizes(6, 2),
    "model_type": "qwen3_next",
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 6,
}
CASES = {
    "1 process": ({}, layout_of()),
    "1 process, tied": ({"tie_word_embeddings": True}, layout_of()),
    "TP3": ({}, layout_of(tp=3)),
    "TP3, tied, biases": ({"tie_word_embeddings": True, "model_type": "qwen2"}, layout_of(tp=3)),
    "TP3, norms of queries and keys": ({"model_type": "qwen3"}, layout_of(tp=3)),
    "TP3, fused projections": ({"model_type": "phi3"}, layout_of(tp=3)),
    "TP3, all biases": ({"attention_bias": True, "mlp_bias": True}, layout_of(tp=3)),
    "TP3, attention biases": ({"attention_bias": True}, layout_of(tp=3)),
    "TP3, MLP biases": ({"mlp_bias": True}, layout_of(tp=3)),
    "experts, EP2, ETP2": (MIXTRAL, layout_of(tp=2, dp=4, ep=2)),
    "experts, EP4, ETP1": (MIXTRAL, layout_of(tp=2, dp=2, ep=4, etp=1)),
    "experts, EP2, CP2, PP2": (QWEN3_MOE, layout_of(tp=2, cp=2, pp=2, ep=2, etp=1)),
    "latent attention, TP2, EP2, ETP1, PP2": (DEEPSEEK, layout_of(tp=2, pp=2, ep=2, etp=1)),
    "latent attention, direct queries, TP2": (DEEPSEEK | {"q_lora_rank": None}, layout_of(tp=2)),
    "Kimi K2, TP2, EP4, ETP1": (DEEPSEEK | {"model_type": "kimi_k2"}, layout_of(tp=2, dp=2, ep=4, etp=1)),
    "GLM, TP3, EP2, ETP3": (GLM, layout_of(tp=3, dp=2, ep=2)),
    "GLM, biases, norms, PP2, EP2": (
        GLM | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 1},
        layout_of(pp=2, dp=2, ep=2),
    ),
    "MTP layer, TP3, EP2, ETP3": (add_mtp(GLM | {"use_qk_norm": True}), layout_of(tp=3, dp=2, ep=2)),
    "MTP layer, latent attention, TP2, EP2, ETP1, PP2, VPP2": (
        add_mtp(DEEPSEEK | {"num_hidden_layers": 4}),
        layout_of(tp=2, pp=2, vpp=2, ep=2, etp=1),
    ),
    "MTP layer after a gated delta net, TP3, EP2, ETP3": (add_mtp(QWEN3_NEXT), layout_of(tp=3, dp=2, ep=2)),
    "MTP layer with the first layer's experts, TP2, EP2, ETP1": (
        add_mtp(QWEN3_NEXT | {"mlp_only_layers": [1, 2]}),
        layout_of(tp=2, ep=2, etp=1),
    ),
    "MTP layer, gated delta nets, tied, TP2, PP2": (
        add_mtp(QWEN3_NEXT | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "tie_word_embeddings": True}),
        layout_of(tp=2, pp=2),
    ),
    "gpt-oss, EP4": ({"model_type": "gpt_oss", **GPT_OSS}, layout_of(dp=4, ep=4)),
    "gpt-oss, TP3, PP2, EP2, ETP1": ({"model_type": "gpt_oss", **GPT_OSS}, layout_of(tp=3, pp=2, dp=2, ep=2, etp=1)),
    "PP2, uneven": ({"num_hidden_layers": 5}, layout_of(pp=2, last=1)),
    "PP2, uneven, tied": ({"num_hidden_layers": 5, "tie_word_embeddings": True}, layout_of(pp=2, first=2)),
    "PP2, VPP2": ({"num_hidden_layers": 8}, layout_of(pp=2, vpp=2)),
    "PP3, VPP2, uneven": ({"num_hidden_layers": 12, "vocab_size": 99}, layout_of(pp=3, vpp=2, first=2, last=6)),
    "PP2, VPP2, uneven, tied": (
        {"num_hidden_layers": 6, "tie_word_embeddings": True},
        layout_of(pp=2, vpp=2, first=4, last=2),
    ),
    "TP3, PP3, DP2, CP2": ({"num_hidden_layers": 5, "vocab_size": 999}, layout_of(3, 3, dp=2, cp=2, first=1, last=2)),
}


PUBLISHED = (
    ("SmolLM2-135M", layout_of(tp=3, pp=2, dp=2, last=13)),
    ("SmolLM2-135M", layout_of(pp=5, vpp=3, cp=2)),
    ("Llama-3.2-1B", layout_of(tp=8, pp=2, dp=2)),
    ("Llama-3.1-8B", layout_of(tp=4, pp=4, cp=2, vpp=2)),
    ("Llama-3.1-405B", layout_of(tp=8, pp=16, dp=8, first=7, last=7)),
    ("Llama-3.1-405B", layout_of(tp=8, pp=18, vpp=7, cp=4)),
    ("Mistral-7B-v0.3", layout_of(tp=8, pp=2, vpp=4)),
    ("Phi-4", layout_of(tp=10, pp=4)),
    ("Qwen2.5-0.5B", layout_of(tp=2, pp=4, dp=2)),
    ("Qwen2.5-72B", layout_of(tp=8, pp=8, vpp=2, dp=2)),
    ("Qwen3-0.6B", layout_of(tp=8, pp=4, first=6, last=4)),
    ("Qwen3-32B", layout_of(tp=8, pp=4, cp=2)),
    ("Mixtral-8x7B", layout_of(tp=4, pp=4, dp=4, ep=8, etp=2)),
    ("Mixtral-8x22B", layout_of(tp=2, pp=8, cp=2, dp=4, ep=4, vpp=7)),
    ("Qwen3-30B-A3B", layout_of(tp=2, pp=6, dp=16, ep=8, etp=4, vpp=2)),
    ("Qwen3-235B-A22B", layout_of(tp=2, pp=8, cp=2, dp=4, ep=16, etp=1, first=11, last=11)),
    ("Qwen3-235B-A22B", layout_of(tp=4, pp=8, dp=4, ep=16, etp=1, first=11, last=11)),
    ("Qwen3-235B-A22B", layout_of(tp=4, pp=4, cp=2, dp=2, ep=16, etp=1, last=22)),
    ("Qwen3-235B-A22B", layout_of(tp=4, pp=8, ep=4, etp=1, first=11, last=11)),
    ("Qwen3-235B-A22B", layout_of(tp=4, pp=16, cp=2, dp=8, ep=4, etp=2, first=5, last=5)),
    ("Moonlight-16B-A3B", layout_of(tp=4, pp=3, dp=4, ep=8, etp=2)),
    ("DeepSeek-V3", layout_of(tp=8, pp=16, dp=4, ep=32, etp=1, last=1)),
    ("DeepSeek-V3", layout_of(tp=4, pp=8, dp=32, ep=8, etp=4, first=7, last=6)),
    ("Qwen3.5-0.8B", layout_of(tp=2, pp=2, cp=2)),
    ("Qwen3.5-2B", layout_of(tp=2, pp=4, vpp=2)),
    ("Qwen3.5-4B", layout_of(tp=4, pp=2)),
    ("Qwen3.5-9B", layout_of(tp=4, pp=4, cp=2)),
    ("Qwen3.5-27B", layout_of(tp=4, pp=8, vpp=2)),
    ("Qwen3.5-35B-A3B", layout_of(tp=2, pp=5, dp=32, ep=64, etp=1)),
    ("Qwen3.5-122B-A10B", layout_of(tp=2, pp=8, cp=2, dp=16, ep=64, etp=1)),
    ("Qwen3.5-397B-A17B", layout_of(tp=2, pp=10, dp=32, ep=64, etp=1)),
    ("Qwen3-Next-80B-A3B", layout_of(tp=2, pp=6, dp=32, ep=64, etp=1)),
    ("Kimi-K2", layout_of(tp=8, pp=16, dp=4, ep=32, etp=1, last=1)),
    ("GLM-4.5-Air", layout_of(tp=4, pp=2, cp=2, dp=4, ep=16, etp=1)),
    ("GLM-4.6", layout_of(tp=8, pp=4, dp=16, ep=32, etp=4)),
    ("gpt-oss-20b", layout_of(tp=2, pp=2, dp=8, ep=16, etp=1)),
    ("gpt-oss-120b", layout_of(tp=8, pp=4, cp=2, dp=4, ep=64, etp=1)),
)
"""Models with layouts of up to 1,024 ranks. All layouts of Qwen3-235B-A22B except the last were published for training
runs of the model.
"""


def has_many_experts(model: str, layout: Layout) -> bool:
    """Return whether a rank has so many experts that building it takes seconds."""
    config = CONFIGS[model]
    experts = next(
        (config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config), 0
    )
    return experts * config["num_hidden_layers"] / (layout.pp * layout.ep) > 50


def label(value: str | Layout) -> str:
    """Return a test id for a model name or a layout."""
    if isinstance(value, str):
        return value
    return " ".join(
        f"{name.upper()}{size}" for name, size in value.model_dump().items() if type(size) is int and size > 1
    )


@pytest.mark.parametrize("case", CASES)
def test_holder_matches_the_built_model(case):
    changes, layout = CASES[case]
    for rank in range(layout.world_size):
        check_rank(config_of(**changes), layout, rank)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, marks=pytest.mark.exhaustive if i % 2 or has_many_experts(*case) else ())
        for i, case in enumerate(PUBLISHED)
    ],
    ids=label,
)
def test_published_models_match_at_layout_corners(model, layout):
    """Check the first rank, the last rank of the second pipeline stage, and the last rank."""
    for rank in (0, 2 * layout.world_size // layout.pp - 1, layout.world_size - 1):
        check_rank(CONFIGS[model], layout, rank)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # Megatron computes all process groups for every rank
@pytest.mark.parametrize(("model", "layout"), PUBLISHED, ids=label)
def test_published_models_match_on_all_distinct_ranks(model, layout):
    """Check one rank per position in tensor, expert and pipeline parallelism; all others are replicas."""
    places = {}
    for rank in range(layout.world_size):
        stage, within = divmod(rank, layout.world_size // layout.pp)
        places.setdefault((stage, within % layout.tp, within % (layout.ep * layout.expert_tp)), rank)
    for rank in places.values():
        check_rank(CONFIGS[model], layout, rank)


FOUR = {"num_hidden_layers": 4}
"""Four layers include all layer types."""

ENGINE_CASES = [
    (CONFIGS["SmolLM2-135M"] | FOUR, layout_of(tp=3, pp=2), 5),
    (CONFIGS["Llama-3.1-8B"] | FOUR | {"attention_bias": True, "mlp_bias": True}, layout_of(tp=4), 1),
    (CONFIGS["Qwen3-30B-A3B"] | FOUR | {"mlp_only_layers": [0]}, layout_of(tp=2, dp=4, ep=8, etp=1), 3),
    (add_mtp(CONFIGS["Qwen3-Next-80B-A3B"] | FOUR), layout_of(tp=2, pp=2), 2),
    (CONFIGS["DeepSeek-V3"], layout_of(tp=8, pp=16, dp=4, ep=32, etp=1, first=3, last=2), 40),
    (CONFIGS["gpt-oss-20b"] | FOUR, layout_of(tp=2, dp=4, ep=8, etp=1), 5),
]

MORE_ENGINE_CASES = [
    (CONFIGS["Mistral-7B-v0.3"] | FOUR, layout_of(tp=8), 7),
    (CONFIGS["Phi-4"] | FOUR, layout_of(tp=10), 3),
    (CONFIGS["Qwen2.5-7B"] | FOUR, layout_of(tp=4, vpp=2, pp=2), 4),
    (CONFIGS["Qwen3-0.6B"] | FOUR, layout_of(tp=2, pp=2), 3),
    (CONFIGS["Mixtral-8x7B"] | FOUR, layout_of(tp=2, dp=8, ep=4, etp=4), 9),
    (CONFIGS["Qwen3.5-9B"] | FOUR, layout_of(tp=4), 2),
    (CONFIGS["Qwen3.5-35B-A3B"] | FOUR, layout_of(tp=2, dp=2, ep=4, etp=1), 3),
    (CONFIGS["Qwen3-Next-80B-A3B"] | FOUR, layout_of(tp=2, pp=2), 1),
    (add_mtp(CONFIGS["Qwen3.5-9B"] | FOUR), layout_of(tp=4), 3),
    (CONFIGS["Moonlight-16B-A3B"] | FOUR, layout_of(tp=2, dp=2, ep=2), 0),
    (CONFIGS["DeepSeek-V3"], layout_of(tp=8, pp=16, dp=4, ep=32, etp=1, first=3, last=2), 0),
    (CONFIGS["Kimi-K2"] | FOUR, layout_of(tp=8, dp=4, ep=32, etp=1), 9),
    (CONFIGS["GLM-4.5-Air"] | FOUR, layout_of(tp=4, dp=4, ep=16, etp=1), 5),
    (CONFIGS["GLM-4.6"] | FOUR, layout_of(tp=8, pp=2, dp=4, ep=32, etp=1), 40),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ENGINE_CASES, id="dense and MoE", marks=pytest.mark.exhaustive),
        pytest.param(MORE_ENGINE_CASES, id="other families", marks=pytest.mark.exhaustive),
    ],
)
def test_transformer_engine_layers_match_the_holder(cases):
    """The layers are built in a separate process in which Megatron can import Transformer Engine."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.unit.resharding.transformer_engine_world"],
        cwd=ROOT,
        input=json.dumps([(config, layout.model_dump(), rank) for config, layout, rank in cases]),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    for (config, layout, rank), shapes in zip(cases, json.loads(process.stdout.splitlines()[-1]), strict=True):
        holder = megatron_holder(config, layout, rank, transformer_engine=True)
        assert holder.shapes == {name: tuple(shape) for name, shape in shapes.items()}, config["model_type"]


def check_rank(config: dict, layout: Layout, rank: int) -> None:
    holder = megatron_holder(config, layout, rank, transformer_engine=uses_transformer_engine())
    real = real_rank(config, layout, rank)
    assert holder.shapes == real.shapes, f"rank {rank}"
    output_projections = ("self_attention.linear_proj.weight", "self_attention.out_proj.weight")
    assert_columns(holder, real.layers, output_projections, "layers", real.tp_rank)
    assert_columns(holder, real.experts, ("linear_fc2.weight",), "experts", real.expert_tp_rank)


def assert_columns(holder: Holder, indices: dict[str, int], names: Sequence[str], kind: str, share: int) -> None:
    """Assert that each layer or expert holds its share of the columns of the parameter with its index. Each has a
    parameter of one of the names."""
    pieces = {piece.local: piece for piece in holder.pieces}
    for prefix, index in indices.items():
        [piece] = [pieces[prefix + name] for name in names if prefix + name in pieces]
        assert f"{kind}.{index}." in piece.canonical, f"{holder.name}: {prefix} has {piece.canonical}"
        columns = holder.shapes[piece.local][1]
        assert piece.canonical_rectangle[1] == (share * columns, (share + 1) * columns), f"{holder.name}: {prefix}"
