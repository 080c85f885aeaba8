from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.tokens_per_microbatch=255"], "(255 < 256). Fix: set actor.tokens_per_microbatch to at least 256"),
        (
            ["actor.layout.cp=6", "actor.tokens_per_microbatch=43"],
            "can have up to rollout.context_length=256 tokens on actor.layout.cp=6 ranks and is never split over "
            "microbatches (43 < 44). Fix: set actor.tokens_per_microbatch to at least 44",
        ),
        (["actor.layout.dp=129"], "actor.layout.dp=129: an update has only 128 samples (16 prompts x 8 samples), but"),
        (
            [GAE, "critic.layout.cp=2", "critic.tokens_per_microbatch=127"],
            "critic.tokens_per_microbatch=127: a sample can",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.tokens_per_microbatch=256"],
        ["actor.layout.dp=128"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
