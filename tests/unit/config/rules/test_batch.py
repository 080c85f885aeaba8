from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch.prompts_per_update=5"],
            "batch.prompts_per_update=5: 16 prompts per step are not divisible by 5 (16 / 5 = 3.2). "
            "Fix: set batch.prompts_per_update to 1, 2, 4, 8 or 16",
        ),
        (["batch.prompts_per_update=32"], "16 prompts per step are not divisible by 32 (16 / 32 = 0.5)"),
        (
            ["algorithm.advantage.estimator=reinforce", "batch.samples_per_prompt=1", "batch.sampling_rounds=3"],
            "batch.sampling_rounds=3: dynamic sampling replaces prompts whose samples all have the same reward. With "
            "batch.samples_per_prompt=1 it would replace every prompt. Fix: set",
        ),
        (
            ["batch.epochs=3", "data={format: messages, source: rows.jsonl}", "algorithm.objective.name=sft"],
            "batch.epochs=3: has no effect unless data.format=prompts. Fix: set data.format=prompts, or remove the key",
        ),
        (
            ["batch={epochs: 2, epochs_kl_limit: 0.1}", "algorithm.objective.name=dpo"],
            "batch.epochs_kl_limit=0.1: has no effect unless algorithm.objective.name=clip (or another objective "
            "that learns from",
        ),
        (
            ["batch.epochs_kl_limit=0.1"],
            "batch.epochs_kl_limit=0.1: has no effect unless batch.epochs=2. Fix: set batch.epochs=2, or remove the "
            "key (its default is null)",
        ),
        (
            ["batch.oversampling=1.5"],
            "batch.oversampling=1.5: with rollout.max_staleness=0 a sample must be used within 1 step, so at most 1 x "
            "batch.prompts_per_step prompts can be in flight. Fix: set batch.oversampling to at most 1, or set",
        ),
        (
            ["batch.oversampling=3.1", "rollout.max_staleness=2", "cluster.placement=disaggregated"],
            "so at most 3 x batch.prompts_per_step prompts can be in flight. Fix",
        ),
        (
            ["batch.oversampling=1", "rollout.max_staleness=2", "cluster.placement=disaggregated"],
            "rollout.max_staleness=2: has no effect unless batch.oversampling=null. Fix: set batch.oversampling=null",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.prompts_per_update=8"],
        ["batch={epochs: 2, epochs_kl_limit: 0.1}"],
        ["batch.epochs=2", "algorithm.objective.name=dpo"],
        ["batch.oversampling=1.5", "rollout.on_stale=drop"],
        ["batch.oversampling=3", "rollout.max_staleness=2", "cluster.placement=disaggregated"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
