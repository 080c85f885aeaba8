"""The limit on the log-prob difference between trainer and engine, and the report above it."""

from __future__ import annotations

import pytest

from megarl.config.load import load
from megarl.config.logprob_check_schema import ROUNDING
from megarl.core.metrics import Metric
from megarl.step.causes import Evidence
from megarl.step.logprob_check import announce, describe_differences, excess
from tests.paths import BASE

KEYS = {
    "float32": ["model.dtype=float32"],
    "bfloat16": ["model.dtype=bfloat16"],
    "float16": ["model.dtype=float16"],
    "fp8_block": ["model.dtype=bfloat16", "rollout.quantization=fp8_block"],
}
AHEAD = ["rollout.max_staleness=2", "cluster.placement=disaggregated"]


def config_of(*overrides: str):
    return load(BASE, ["model.path=m", "data.source=d", *overrides])


def told(config, difference: float) -> str | None:
    return excess(config, {"mismatch/logprob_abs_mean": Metric(difference)})


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_difference_above_rounding_is_reported(precision: str, share: float) -> None:
    difference = share * ROUNDING[precision]
    found = told(config_of(*KEYS[precision]), difference)
    assert (found is not None) == (share > 1)
    assert found is None or (f"{difference:.1e} per token" in found and f"rounding limit for {precision}" in found)


def test_configured_limit_replaces_the_rounding_limit() -> None:
    config = config_of("logprob_check.limit=0.4")
    assert told(config, 0.3) is None and "exceeds logprob_check.limit=0.4" in told(config, 0.5)


def test_images_have_denoising_steps_instead_of_tokens() -> None:
    config = config_of("rollout.engine=diffusers", "logprob_check.action=mask")
    assert told(config, 1e-3) == (
        "the engines' log-probs differ from the trainer's by 1.0e-03 per denoising step, which exceeds the limit for "
        "images (0.0001)"
    )
    [line] = announce(config)
    assert line.startswith("logprob_check: the loss excludes denoising steps whose log-probs differ between")


def test_policy_lag_has_no_limit() -> None:
    config = config_of(*AHEAD)
    assert excess(config, {"policy_lag/logprob_abs_mean": Metric(10.0)}) is None
    assert told(config, 0.9 * ROUNDING["bfloat16"]) is None and told(config, 1.1 * ROUNDING["bfloat16"]) is not None


def test_step_without_policy_training_has_no_limit() -> None:
    assert excess(config_of(), {}) is None


def test_startup_log_names_samples_excluded_from_the_loss() -> None:
    assert announce(config_of()) == announce(config_of("logprob_check.action=stop")) == []
    [line] = announce(config_of("logprob_check.action=mask", "logprob_check.mask=sample"))
    assert line.startswith("logprob_check: the loss excludes samples with a token whose log-prob differs ")
    assert "by more than 1.5" in line


def test_engine_with_the_largest_difference_is_explained() -> None:
    found = {name: Evidence(0.1, apart, apart, differing=()) for name, apart in {"a": 0.01, "b": 0.5, "c": 0.2}.items()}
    assert "2 of 3 engines (b, c) exceed the limit" in describe_differences(found)
    assert "b differs most from the trainer: by 5.0e-01 per token in greedy responses" in describe_differences(found)
    assert "  1. kernels: " in describe_differences(found)
