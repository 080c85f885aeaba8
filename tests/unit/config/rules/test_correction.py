from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.correction={old: rollout, mask: sequence}"],
            "algorithm.correction.mask=sequence: with algorithm.correction.old=rollout the old policy is the one that",
        ),
        (
            ["algorithm.correction={mask: token, mask_low: 5}"],
            "algorithm.correction.mask_low=5: no ratio is between it and mask_high=5; set mask_low below 5",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line
