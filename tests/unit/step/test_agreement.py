"""A warning where trainer and engine differ by more than rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.metrics import Metric
from megarl.step.agreement import LIMITS, warn_of_disagreement
from tests.paths import BASE

KEYS = {
    "float32": ["model.dtype=float32"],
    "bfloat16": ["model.dtype=bfloat16"],
    "fp8_block": ["model.dtype=bfloat16", "rollout.quantization=fp8_block"],
}


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_difference_above_rounding_is_told_with_the_logs(precision, share, capsys):
    difference, config = share * LIMITS[precision], load(BASE, ["model.path=m", "data.source=d", *KEYS[precision]])
    warn_of_disagreement(config, {"mismatch/logprob_abs_mean": Metric(difference)}, Path("run/logs/attempt_1"))
    told = capsys.readouterr().err
    assert (f"{difference:.1e} a token" in told and "run/logs/attempt_1/engine-*.log" in told) == (share > 1)
    assert bool(told) == (share > 1)


def test_a_step_that_does_not_train_the_policy_has_none(capsys):
    warn_of_disagreement(load(BASE, ["model.path=m", "data.source=d"]), {}, Path("logs"))
    assert not capsys.readouterr().err
