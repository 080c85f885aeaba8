"""A warning where trainer and engine differ by more than rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.metrics import Metric
from megarl.step.agreement import LIMITS, warn_of_disagreement


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_difference_above_rounding_is_told_with_the_logs(dtype, share, capsys):
    difference = share * LIMITS[dtype]
    warn_of_disagreement(dtype, {"mismatch/logprob_abs_mean": Metric(difference)}, Path("run/logs/attempt_1"))
    told = capsys.readouterr().err
    assert (f"{difference:.1e} a token" in told and "run/logs/attempt_1/engine-*.log" in told) == (share > 1)
    assert bool(told) == (share > 1)


def test_a_step_that_does_not_train_the_policy_has_none(capsys):
    warn_of_disagreement("float32", {}, Path("logs"))
    assert not capsys.readouterr().err
