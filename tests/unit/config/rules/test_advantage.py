from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch.samples_per_prompt=1"],
            "batch.samples_per_prompt=1: algorithm.advantage.estimator=grpo compares the samples of a prompt",
        ),
        (
            ["algorithm.advantage.gae_lambda=0.9"],
            "algorithm.advantage.gae_lambda: unknown key; algorithm.advantage.estimator=grpo has std, std_epsilon, "
            "std_over, gamma, credit, limit, group_of_one, whiten, whiten_over, whiten_std, whiten_epsilon; "
            "gae_lambda is an option of bi_level_gae, gae. Fix: remove the key, or set "
            "algorithm.advantage.estimator to one of these",
        ),
        (
            ["algorithm.advantage.estimator=rloo", "batch.samples_per_prompt=1"],
            (
                "batch.samples_per_prompt=1: algorithm.advantage.estimator=rloo compares the samples of a prompt and "
                "needs at least 2. Fix: set"
            ),
        ),
        (
            ["algorithm.advantage.estimator=pass_at_k", "algorithm.advantage.k=9"],
            (
                "algorithm.advantage.k=9: it exceeds batch.samples_per_prompt=8. Fix: set algorithm.advantage.k to at "
                "most 7"
            ),
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, k: 8}"],
            "algorithm.advantage.k=8: it equals batch.samples_per_prompt=8, so there is only one subset of k samples",
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, k: 9, pass_at_k_baseline: without}"],
            (
                "algorithm.advantage.k=9: it exceeds batch.samples_per_prompt=8. Fix: set algorithm.advantage.k to at "
                "most 8"
            ),
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, std: sample}"],
            "algorithm.advantage.std=sample: expected 'population' or 'none'",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.samples_per_prompt=2"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
