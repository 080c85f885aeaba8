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
            "batch.samples_per_prompt=1 that is each of them; set batch.sampling_rounds=1",
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
    ],
)
def test_edge_of_a_rule_is_kept(overrides: list[str]) -> None:
    recipe(*overrides)
