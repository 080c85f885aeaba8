from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.kl.adaptive_target=0.1"],
            "algorithm.kl.adaptive_target=0.1: has no effect unless algorithm.kl.coefficient=0.001. Fix",
        ),
        (
            ["algorithm.kl={coefficient: 0.1, adaptive_target: 0.1, adaptive_horizon: 127}"],
            (
                "algorithm.kl.adaptive_horizon=127: a step has 16 x 8 = 128 samples, so one step could change the "
                "coefficient by"
            ),
        ),
        (
            ["algorithm.kl.renew_steps=2"],
            "algorithm.kl.renew_steps=2: has no effect unless algorithm.kl.coefficient=0.001. Fix",
        ),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.renew_share=0.1"],
            "algorithm.kl.renew_share=0.1: has no effect unless algorithm.kl.renew_steps=1. Fix",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line
