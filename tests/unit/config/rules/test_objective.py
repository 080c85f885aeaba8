"""The requirements of an objective on data and other keys."""

from __future__ import annotations

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import BASE
from tests.unit.config.rules import recipes as rules

GIVEN = {
    "sft": ("algorithm.objective.name=sft", "data.format=messages"),
    "reward_model": ("algorithm.objective.name=reward_model", "data.format=preferences"),
    "dpo": ("algorithm.objective.name=dpo", "data.format=preferences"),
    "online": ("algorithm.objective.name=dpo",),
}


def recipe(kind: str, *overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=rows.jsonl", *GIVEN[kind], *overrides])


def error_text(kind: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        recipe(kind, *overrides)
    return str(error.value)


@pytest.mark.parametrize("kind", GIVEN)
def test_minimal_recipe_of_each_kind_is_valid(kind):
    config = recipe(kind)
    assert config.is_offline == (kind != "online")
    assert config.trained_per_prompt == (1 if kind == "sft" else 2)
    assert config.has_reference == (kind in ("dpo", "online"))
    assert not config.has_critic


def test_rollout_keys_do_not_affect_offline_objectives():
    recipe("sft", "batch.samples_per_prompt=1", "rewards.functions=[]", "rollout.max_new_tokens=4096")


@pytest.mark.parametrize(
    ("kind", "overrides", "line"),
    [
        (
            "sft",
            ["data.format=prompts"],
            "data.format=prompts: algorithm.objective.name=sft learns from messages. Fix: set data.format=messages, "
            "or set algorithm.objective.name to cispo or clip or",
        ),
        (
            "sft",
            ["algorithm.objective.name=clip"],
            "data.format=messages: algorithm.objective.name=clip learns from prompts. Fix: set data.format=prompts, "
            "or set algorithm.objective.name to sft",
        ),
        (
            "dpo",
            ["data.format=messages"],
            "data.format=messages: algorithm.objective.name=dpo learns from preferences or ",
        ),
        (
            "sft",
            ["algorithm.objective.beta=0.1"],
            "algorithm.objective.beta: unknown key; algorithm.objective.name=sft has nll_coefficient; beta is "
            "an option of dpo",
        ),
        (
            "reward_model",
            ["algorithm.objective.length_normalised=true"],
            "algorithm.objective.length_normalised: unknown key; algorithm.objective.name=reward_model has "
            "label_smoothing;",
        ),
        (
            "dpo",
            ["algorithm.kl.coefficient=0.1"],
            "algorithm.kl.coefficient=0.1: has no effect unless algorithm.objective.name=clip (or another objective "
            "that learns from advantages). Fix: set algorithm.objective.name=clip (or another objective that learns "
            "from advantages), or remove the key (its default is 0.0)",
        ),
        (
            "online",
            ["algorithm.advantage.estimator=gae"],
            "algorithm.advantage.estimator=gae: has no effect unless algorithm.objective.name=clip",
        ),
        (
            "sft",
            ["rollout.temperature=0.5"],
            "rollout.temperature=0.5: has no effect unless data.format=prompts. Fix: set data.format=prompts, or "
            "remove the key (its default is 1.0)",
        ),
        ("sft", ["reward_model.path=x"], "reward_model.path=x: has no effect unless data.format=prompts. Fix"),
        (
            "dpo",
            ["algorithm.objective.aggregation=token_mean"],
            "algorithm.objective.aggregation=token_mean: has no effect unless algorithm.objective.name=clip (or "
            "another objective with a loss for each token). Fix",
        ),
        (
            "online",
            ["algorithm.objective.empty_samples=exclude"],
            "algorithm.objective.empty_samples=exclude: has no effect unless algorithm.objective.name=clip",
        ),
        (
            "sft",
            ["algorithm.objective.aggregation=sequence_mean_over_max_tokens"],
            (
                "algorithm.objective.aggregation=sequence_mean_over_max_tokens: the loss is divided by "
                "rollout.max_new_tokens"
            ),
        ),
        (
            "sft",
            ["data.chat_template=false"],
            "data.chat_template=false: data.format=messages requires a chat template",
        ),
        ("online", ["batch.samples_per_prompt=1"], "batch.samples_per_prompt=1: algorithm.objective.name=dpo compares"),
        (
            "dpo",
            ["rollout.context_length=512", "actor.tokens_per_microbatch=1000"],
            "actor.tokens_per_microbatch=1000: a pair can have up to 2 x rollout.context_length=512 tokens and is "
            "never split over microbatches (1000 < 1024). Fix: set actor.tokens_per_microbatch to at least 1024",
        ),
        (
            "online",
            ["actor.layout.dp=128"],
            "actor.layout.dp=128: an update has only 64 pairs, which are never split, but each data-parallel rank",
        ),
        (
            "sft",
            ["actor.layout.dp=65"],
            "actor.layout.dp=65: an update has only 64 rows, but each data-parallel rank needs at least one",
        ),
    ],
)
def test_error_names_the_key_and_the_remedy(kind, overrides, line):
    assert line in error_text(kind, *overrides)


def test_every_key_without_effect_is_named():
    lines = error_text("sft", "algorithm.correction.mask=token", "algorithm.objective.entropy_coefficient=0.1")
    assert [line.partition(":")[0] for line in lines.splitlines()] == [
        "algorithm.objective.entropy_coefficient=0.1",
        "algorithm.correction.mask=token",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.objective.clip_low=1"], "algorithm.objective.clip_low=1: expected less than 1"),
        (
            ["algorithm.objective={name: clip_cov, covariance_low: 6}"],
            (
                "algorithm.objective.covariance_low=6: it must be below algorithm.objective.covariance_high=5, or no "
                "token can be selected"
            ),
        ),
        (
            ["algorithm.objective.name=gspo", "algorithm.objective.dual_clip=3"],
            "algorithm.objective.dual_clip: unknown key; algorithm.objective.name=gspo has clip_low, clip_high; "
            "dual_clip "
            "is an option of clip",
        ),
        (
            ["algorithm.objective={name: unclipped, tau_positive: 1}"],
            "algorithm.objective.tau_positive: unknown key; algorithm.objective.name=unclipped has no options; "
            "tau_positive is an option of sapo",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = rules.errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.objective.clip_low=0.99"],
        ["algorithm.objective={name: gmpo, clip_low: 1.5}"],
        ["algorithm.objective={name: dro, tau: 0.1, level: token}"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    rules.recipe(*overrides)


def test_adaptive_penalty_requires_several_updates() -> None:
    keys = ("algorithm.objective={name: kl_penalty, penalty_target: 0.01}",)
    [line] = rules.errors(*keys)
    assert line.startswith(
        "algorithm.objective.penalty_target=0.01: with one update per step, the policy equals the old policy"
    )
    assert rules.recipe(*keys, "batch.prompts_per_update=8").algorithm.objective.adapted_penalty_target == 0.01
    assert rules.recipe(*keys, "batch.epochs=2").algorithm.objective.adapted_penalty_target == 0.01
