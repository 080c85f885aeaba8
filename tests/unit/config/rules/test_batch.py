from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch.prompts_per_update=5"],
            "batch.prompts_per_update=5: 16 prompts per step do not divide by 5 (16 / 5 = 3.2); "
            "choose from 1, 2, 4, 8, 16",
        ),
        (["batch.prompts_per_update=32"], "16 prompts per step do not divide by 32 (16 / 32 = 0.5)"),
        (
            ["algorithm.advantage.estimator=reinforce", "batch.samples_per_prompt=1", "batch.sampling_rounds=3"],
            "batch.sampling_rounds=3: prompts whose samples all have one reward are replaced, and with "
            "batch.samples_per_prompt=1 that is each of them. Fix: set batch.sampling_rounds=1",
        ),
        (
            ["batch.epochs=3", "data={format: messages, source: rows.jsonl}", "algorithm.objective.name=sft"],
            "batch.epochs=3: has no effect unless data.format=prompts. Fix: set data.format=prompts, or remove the key",
        ),
        (
            ["batch={epochs: 2, epochs_kl_limit: 0.1}", "algorithm.objective.name=dpo"],
            "batch.epochs_kl_limit=0.1: has no effect unless algorithm.objective.name=clip (or another objective that learns from",
        ),
        (
            ["batch.epochs_kl_limit=0.1"],
            "batch.epochs_kl_limit=0.1: has no effect unless batch.epochs=2. Fix: set batch.epochs=2, or remove the "
            "key, which is null by default",
        ),
        (
            ["batch.oversampling=1.5"],
            "batch.oversampling=1.5: the one step that may train on a sample with rollout.max_staleness=0 has no room "
            "for more than 1 times the prompts of one. Fix: set rollout.on_stale=drop, which ends the rest, or",
        ),
        (
            ["batch.oversampling=3.1", "rollout.max_staleness=2", "cluster.placement=disaggregated"],
            "have no room for more than 3 times the prompts of one",
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
def test_edge_of_a_rule_is_kept(overrides: list[str]) -> None:
    recipe(*overrides)
