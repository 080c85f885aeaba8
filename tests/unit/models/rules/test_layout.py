from __future__ import annotations

from typing import Any

import pytest

from megarl.models.rules import check_model
from tests.published_models import CONFIGS
from tests.unit.config.rules.recipes import recipe
from tests.unit.models.rules.model_configs import MIXTRAL, QWEN3_MOE, SMOLLM2, model_errors


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
        ["actor.layout.dp=2"],
        ["rollout.tp=3"],
        ["rollout.context_length=8192", "actor.tokens_per_microbatch=8192"],
        ["actor.layout.pp=4", "actor.layout.last_stage_layers=6"],
        ["actor.layout.pp=4", "actor.layout.first_stage_layers=8", "actor.layout.last_stage_layers=6"],
        ["actor.layout.first_stage_layers=17"],
        ["actor.layout.pp=30", "actor.layout.last_stage_layers=null"],
    ],
)
def test_model_fits(overrides: list[str]) -> None:
    check_model(recipe(*overrides), SMOLLM2)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["actor.layout.tp=2"],
            [
                (
                    "actor.layout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set "
                    "actor.layout.tp to 1 or 3"
                ),
                (
                    "actor.layout.tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set actor.layout.tp to "
                    "1 or 3"
                ),
            ],
        ),
        (
            ["actor.layout.tp=9"],
            [
                (
                    "actor.layout.tp=9: 3 KV heads are not divisible by 9 (3 / 9 = 0.3333). Fix: set actor.layout.tp "
                    "to 1 or 3"
                ),
                (
                    "actor.layout.tp=9: 1536 MLP rows (intermediate_size) are not divisible by 9 (1536 / 9 = 170.7). "
                    "Fix: set"
                ),
            ],
        ),
        (
            ["rollout.tp=2"],
            [
                "rollout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set rollout.tp to 1 or 3",
                "rollout.tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set rollout.tp to 1 or 3",
            ],
        ),
        (["rollout.tp=9"], ["rollout.tp=9: 1536 MLP rows (intermediate_size) are not divisible by 9"]),
        (
            ["actor.layout.pp=4", "actor.layout.last_stage_layers=null"],
            [
                "actor.layout.pp=4: 30 layers cannot be split evenly over the stages: 30 layers over 4 stages (30 / 4 "
                "= 7.5). Fix: set pp to 1, 2, 3, 5, 6, 10, 15 or 30 with first_stage_layers=null and "
                "last_stage_layers=null, or last_stage_layers=6 alone (3 x 8 + 6 = 30)"
            ],
        ),
        (
            ["actor.layout.pp=3", "actor.layout.last_stage_layers=13"],
            [
                "actor.layout.pp=3, last_stage_layers=13: 30 layers cannot be split evenly over the stages: 30 - 13 = "
                "17 layers over 2 other stages (17 / 2 = 8.5). Fix: set pp"
            ],
        ),
        (
            ["actor.layout.vpp=2"],
            [
                "actor.layout.vpp=2: 13 layers of a pipeline stage (last_stage_layers) are not divisible by 2 (13 / 2 "
                "= 6.5). Fix: set actor.layout.vpp to 1"
            ],
        ),
        (["actor.layout.last_stage_layers=30"], ["30 - 30 = 0 layers over 1 other stage (0 / 1 = 0). Fix: set pp"]),
        (["actor.layout.first_stage_layers=13"], ["30 - 13 - 13 = 4 layers over 0 other stages. Fix: set pp"]),
        (
            ["actor.layout.pp=31", "actor.layout.last_stage_layers=null"],
            ["30 layers over 31 stages (30 / 31 = 0.9677)"],
        ),
        (
            ["rollout.context_length=8193", "actor.tokens_per_microbatch=10000"],
            ["rollout.context_length=8193: the model has 8192 positions (max_position_embeddings). Fix: set"],
        ),
        (
            ["rollout.top_k=49153"],
            ["rollout.top_k=49153: the model's vocabulary has 49152 tokens. Fix: set rollout.top_k to"],
        ),
    ],
)
def test_layout_that_does_not_fit_the_model_is_refused(overrides: list[str], messages: list[str]) -> None:
    lines = model_errors(SMOLLM2, *overrides)
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (SMOLLM2, ["actor.layout.ep=2", "actor.layout.dp=2"], "actor.layout.ep=2: model.path=smollm2 has no experts"),
        (
            QWEN3_MOE,
            ["algorithm.trust_region.kl_limit=0.01", "algorithm.objective.name=unclipped", "model.dtype=float32"],
            "model.path=smollm2 may route a token to different experts in each pass. Fix: set algorithm.trust_region",
        ),
        (
            MIXTRAL,
            ["actor.layout.ep=3", "actor.layout.dp=3"],
            (
                "actor.layout.ep=3: 8 experts are not divisible by 3 (8 / 3 = 2.667). Fix: set actor.layout.ep to 1, "
                "2, 4 or 8"
            ),
        ),
        (
            QWEN3_MOE,
            ["actor.layout.ep=3", "actor.layout.dp=12", "actor.layout.etp=4"],
            (
                "actor.layout.etp=4: 10 MLP rows of an expert are not divisible by 4 (10 / 4 = 2.5). Fix: set "
                "actor.layout.etp to 1, 2, 5 or 10"
            ),
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=6", "actor.layout.sequence_parallel=true"],
            "actor.layout.tp=6: 10 MLP rows of an expert are not divisible by 6",
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=2"],
            "actor.layout.tp=2, sequence_parallel=false: every rank would dispatch all tokens",
        ),
        (QWEN3_MOE, ["rollout.tp=6"], "rollout.tp=6: 10 MLP rows of an expert are not divisible by 6"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, [], "megarl does not support router_jitter_noise 0.1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(model: dict[str, Any], overrides: list[str], message: str) -> None:
    (line,) = model_errors(model, *overrides)
    assert message in line


@pytest.mark.parametrize(
    ("layout", "fix"),
    [
        ("tp: 2", "actor.layout.etp=1 and actor.layout.ep to at least 2, or set actor.layout.tp=1"),
        ("tp: 2, ep: 2, etp: 2, dp: 2", "actor.layout.etp=1"),
    ],
)
def test_experts_with_biases_are_not_sharded(layout: str, fix: str) -> None:
    model = CONFIGS["gpt-oss-20b"]
    (line,) = model_errors(model, f"actor.layout={{{layout}, sequence_parallel: true}}")
    assert line == (
        "actor.layout.etp=2: the experts have biases, which Megatron does not support in sharded experts. Fix: set "
        f"{fix}"
    )
    check_model(recipe("actor.layout={tp: 2, ep: 2, etp: 1, sequence_parallel: true}"), model)
    check_model(recipe("actor.layout={dp: 2}"), model)


def test_delta_net_heads_must_divide_over_tp_and_cp() -> None:
    model = CONFIGS["Qwen3.5-27B"]
    check_model(recipe("actor.layout={tp: 4, cp: 4}"), model)
    lines = model_errors(model, "actor.layout={tp: 2, cp: 3}")
    assert lines == [
        "actor.layout.tp=2, cp=3: 16 key heads of the gated delta nets cannot be split over tp x cp = 2 x 3 = 6 ranks. "
        "Fix: set actor.layout.tp and actor.layout.cp so that their product is 1, 2, 4, 8 or 16"
    ]
    lines = model_errors(model | {"linear_num_key_heads": 6, "linear_num_value_heads": 6}, "rollout.tp=4")
    assert lines == [
        "rollout.tp=4: 6 key heads of the gated delta nets are not divisible by 4 (6 / 4 = 1.5). Fix: set rollout.tp "
        "to 1 or 2"
    ]


def test_dense_mlp_rows_are_ignored_without_dense_layers() -> None:
    odd = QWEN3_MOE | {"intermediate_size": 7}
    check_model(recipe("rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"), odd)
    lines = model_errors(
        odd | {"mlp_only_layers": [3]}, "rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"
    )
    assert ["7 MLP rows (intermediate_size) are not divisible by 2" in line for line in lines] == [True, True]


def test_missing_kv_heads_default_to_attention_heads() -> None:
    ungrouped = {name: value for name, value in SMOLLM2.items() if name != "num_key_value_heads"}
    (line,) = model_errors(ungrouped, "actor.layout.tp=9")
    assert "MLP rows" in line
