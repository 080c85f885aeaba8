from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [GAE, "run.steps=3", "critic.warmup_steps=3"],
            (
                "critic.warmup_steps=3: the actor would never be trained, because run.steps=3. Fix: set "
                "critic.warmup_steps"
            ),
        ),
        (
            [GAE, "critic.shared_backbone=true", "critic.warmup_steps=1"],
            "critic.warmup_steps=1: has no effect unless critic.shared_backbone=false. Fix: set",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE, "batch.samples_per_prompt=1", "run.steps=3", "critic.warmup_steps=2"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
