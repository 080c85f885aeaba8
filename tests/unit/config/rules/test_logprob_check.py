from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["logprob_check.action=mask", "algorithm.correction.old=rollout"],
            "logprob_check.action=mask: with algorithm.correction.old=rollout, the trainer computes no log-probs to "
            "compare with the engine's. Fix: set",
        ),
        (
            ["logprob_check.action=mask", "algorithm.objective={name: dpo, aggregation: sequence_mean_of_token_means}"],
            "logprob_check.action=mask: algorithm.objective.name=dpo computes one loss per pair, so single",
        ),
        (
            ["logprob_check.action=stop", "rollout.max_staleness=1", "cluster.placement=disaggregated"],
            "logprob_check.action=stop: with rollout.max_staleness=1, all samples of a step may be stale",
        ),
        (
            ["logprob_check.mask=sample"],
            "logprob_check.mask=sample: has no effect unless logprob_check.action=mask",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


def test_edge_of_a_rule_is_accepted() -> None:
    keys = [
        "logprob_check.action=stop",
        "rollout.max_staleness=1",
        "cluster.placement=disaggregated",
        "logprob_check.canaries=refits",
        "logprob_check.limit=2",
    ]
    assert recipe(*keys).agreement_limit == 2
