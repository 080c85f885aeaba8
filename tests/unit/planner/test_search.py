"""Layouts that the search proposes: all follow the rules and fit in memory, and the fastest comes first."""

from __future__ import annotations

import json
from functools import cache

import pytest

from megarl.cluster.memory.parameters import Models
from megarl.config.device_spans import num_devices
from megarl.config.load import load
from megarl.config.rules.shared_gpu import RULES
from megarl.core.errors import UserError
from megarl.planner.hardware import read_cluster
from megarl.planner.layouts import broken_rules
from megarl.planner.plan import describe_layout, plan_recipe
from megarl.planner.plan_text import table
from megarl.planner.search import SearchResult, search
from megarl.planner.workload import TextWorkload
from tests.paths import CONFIGS as CONFIGS_FOLDER
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import layout_keys, recipe

GAE = "algorithm.advantage.estimator=gae"


@cache
def found(model: str, gpus: str, *overrides: str) -> SearchResult:
    config = recipe(*overrides)
    return search(
        config, CONFIGS[model], Models.of({"actor": CONFIGS[model]}), TextWorkload.of(config), read_cluster(gpus)
    )


@pytest.mark.parametrize(
    ("model", "gpus", "overrides"),
    [
        ("Qwen2.5-7B", "8xH100", ()),
        ("Qwen2.5-7B", "8xH100", ("cluster.placement=disaggregated",)),
        pytest.param(
            *("Qwen3-32B", "32xH100", ("algorithm.kl.coefficient=0.1", "batch.prompts_per_update=32")),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("Mixtral-8x7B", "32xH200", ("rollout.context_length=16384",), marks=pytest.mark.exhaustive),
        pytest.param(
            "Mixtral-8x7B",
            "16xH200",
            ("rollout.context_length=16384", "algorithm.kl.coefficient=0.1"),
            marks=pytest.mark.exhaustive,
        ),
        ("Mixtral-8x7B", "8xH200", ("rollout.context_length=16384", "algorithm.kl.coefficient=0.1")),
        ("Phi-4", "24xH100", ()),
    ],
)
def test_proposed_plans_fit_and_keep_the_rules(model, gpus, overrides):
    result = found(model, gpus, *overrides)
    assert result.plans and result.nearest is None
    seconds = [plan.times.seconds for plan in result.plans]
    assert seconds == sorted(seconds)
    for plan in result.plans:
        assert plan.problem is None
        assert broken_rules(plan.config, CONFIGS[model]) == []
        assert [rule(plan.config) for rule in RULES] == [None] * len(RULES)
        assert num_devices(plan.config) <= plan.cluster.num_gpus
        if plan.config.is_colocated:
            assert num_devices(plan.config) == plan.cluster.num_gpus


def test_search_offloads_models_that_fit_only_in_turns():
    """Actor and critic of 7B on two GPUs fit only one at a time."""
    models, config = dict.fromkeys(("actor", "critic"), CONFIGS["Qwen2.5-7B"]), recipe(GAE)
    assert config.actor.offload == config.critic.offload == []
    result = search(config, models["actor"], Models.of(models), TextWorkload.of(config), read_cluster("2xH100"))
    assert result.plans and all(plan.config.critic.offload for plan in result.plans)


def test_indivisible_sizes_are_named_with_the_arithmetic():
    result = found("Qwen2.5-7B", "8xH100")
    assert (
        "actor.layout.tp=8: 28 attention heads are not divisible by 8 (28 / 8 = 3.5). Fix: set actor.layout.tp to "
        "1, 2 or 4"
    ) in result.refused
    assert any(line.startswith("rollout.tp=8: 28 attention heads") for line in result.refused)


def test_rule_broken_in_every_layout_is_refused():
    with pytest.raises(UserError, match=r"rollout\.context_length=65536: the model has 40960 positions"):
        found("Qwen3-32B", "32xH100", "rollout.context_length=65536", "actor.tokens_per_microbatch=65536")


def test_nearest_layout_is_reported_if_none_fits():
    result = found("Qwen2.5-72B", "8xA100")
    assert not result.plans
    assert "a GPU would hold" in result.nearest.problem


def test_layout_description_lists_only_changed_sizes():
    config = recipe(*layout_keys(tp=2, pp=4, ep=2, dp=2, last_stage_layers=1))
    sizes = config.actor.layout.model_dump()
    assert describe_layout(sizes) == dict(tp=2, pp=4, ep=2, dp=2, etp=2, last_stage_layers=1)
    assert describe_layout(recipe().actor.layout.model_dump()) == {"dp": 1}


def test_recomputation_is_chosen_only_if_needed():
    small, large = (
        found("Qwen3-0.6B", "2xH200"),
        found("Qwen3-8B", "4xH100", "rollout.context_length=32768", "actor.tokens_per_microbatch=32768"),
    )
    assert small.plans[0].config.actor.recompute == "none"
    assert large.plans[0].config.actor.recompute != "none"


UNPLANNED = "base.yaml", "smollm2-cpu-distillation.yaml", "smollm2-cpu-rlhf.yaml", "tiny-flow-cpu-flow-grpo.yaml"

RECIPES = sorted(path.name for path in CONFIGS_FOLDER.glob("*.yaml") if path.name not in UNPLANNED)
"""megarl's recipes, except those whose models other recipes train, and one whose model a tool creates."""


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name, cache_with_config, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(cache_with_config))
    planned = plan_recipe(load(CONFIGS_FOLDER / name), read_cluster("4xH100"))
    assert planned.best.problem is None
    assert ", with matrix products in bfloat16:" in table(planned)


def test_headroom_stays_free_in_every_phase():
    """The search uses almost all memory for the KV cache if it may."""
    keys = ("rollout.max_new_tokens=16384", "rollout.context_length=32768", "actor.tokens_per_microbatch=32768")
    config, models = recipe(*keys), CONFIGS["Qwen2.5-7B"]

    def fullest(headroom: float) -> float:
        cluster = read_cluster("4xH100", headroom=headroom)
        result = search(config, models, Models.of({"actor": models}), TextWorkload.of(config), cluster)
        return max(plan.fullest.total for plan in result.plans) / 2**30 / 79.6

    assert 0.95 < fullest(0.0) <= 1
    assert 0.85 < fullest(0.08) <= 0.92


NOTHING_FITS = {
    "heads": (
        {"num_hidden_layers": 1, "intermediate_size": 1_000_000},
        [],
        [
            "8xH100-80GB: no valid layout fits. Weights and gradients of the actor need ",
            "actor.layout.tp=2: 7 attention heads are not divisible by 2 (7 / 2 = 3.5)\n",
            "actor.layout.pp: num_hidden_layers=1 and 8 GPUs require pp=1\nFix: change the model or the recipe",
        ],
    ),
    "memory": (
        {"num_hidden_layers": 100, "intermediate_size": 1_000_000},
        [],
        ["8xH100-80GB: no layout fits. ", "Even if they are divided evenly over 8 GPUs, each GPU would hold "],
    ),
    "samples": (
        {"num_hidden_layers": 1, "intermediate_size": 1024},
        ["batch.prompts_per_update=1", "batch.samples_per_prompt=4", "rollout.context_length=2048"],
        [
            "8xH100-80GB: no layout is valid. Limits on layouts:\n",
            "  actor.layout.dp=8: an update has only 4 samples (1 prompts x 4 samples), but each data-parallel rank",
        ],
    ),
    "engines": (
        {"num_hidden_layers": 1, "intermediate_size": 1024},
        ["cluster.placement=disaggregated", "reward_model.path={model}", "reward_model.layout.dp=6"],
        ["too few GPUs for cluster.placement=disaggregated, which separates actor, reward_model, engines. Fix: use "],
    ),
}


@pytest.mark.parametrize("cause", NOTHING_FITS)
def test_error_names_why_no_layout_is_valid(cause, tmp_path):
    sizes, keys, expected = NOTHING_FITS[cause]
    heads = dict(hidden_size=7168, num_attention_heads=7, num_key_value_heads=7, head_dim=1024)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"] | heads | sizes))
    overrides = [key.format(model=tmp_path) for key in ["model.path={model}", "rollout.max_new_tokens=1024", *keys]]
    with pytest.raises(UserError) as error:
        plan_recipe(recipe(*overrides), read_cluster("8xH100"))
    for part in expected:
        assert part in str(error.value)
    assert ("GiB" in str(error.value)) == (cause in ("heads", "memory"))
