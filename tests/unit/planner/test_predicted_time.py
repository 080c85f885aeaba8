"""Tests of the planned time of a step by the causes of the time ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.planner.predicted_time import predicted_causes, write_prediction
from megarl.run.time_ledger import read_ledger
from tests.unit.planner.plan_cases import layout_keys, plan_of

COLOCATED = (*layout_keys(dp=8), "rollout.replicas=8", "cluster.placement=colocated", "checkpoint.every_steps=10")
APART = (
    *layout_keys(dp=4),
    "rollout.replicas=4",
    "cluster.placement=disaggregated",
    "rollout.sleep=false",
    "checkpoint.every_steps=null",
)
MODEL, GPUS = "Qwen2.5-0.5B", "8xH100-80GB"


def test_colocated_step_equals_the_plan() -> None:
    plan = plan_of(MODEL, GPUS, *COLOCATED)
    times, found = plan.times, predicted_causes(plan)
    assert times.rollout is not None and times.refit is not None and plan.save is not None
    assert found["rollout"] == pytest.approx(times.rollout.full)
    assert found["rollout"] + found["long_rollouts"] == pytest.approx(times.rollout.seconds)
    assert found["train"] == pytest.approx(times.training_seconds + times.moving)
    assert found["refit"] == pytest.approx(times.refit.seconds)
    assert found["checkpoint"] == pytest.approx(plan.save.copying / 10)
    assert sum(found.values()) == pytest.approx(times.seconds + found["checkpoint"])


def test_separate_devices_wait_for_each_other() -> None:
    plan = plan_of(MODEL, GPUS, *APART)
    times, found = plan.times, predicted_causes(plan)
    assert times.rollout is not None
    assert found["idle_trainers"] == pytest.approx(times.rollout.seconds / 2)
    assert found["idle_engines"] == pytest.approx(times.training_seconds / 2)
    assert sum(found.values()) == pytest.approx(times.seconds)


def test_asynchronous_step_takes_the_overlapped_time() -> None:
    plan = plan_of(MODEL, GPUS, *APART, "rollout.max_staleness=1")
    overlapped = plan.times.overlapped(is_colocated=False)
    assert overlapped is not None and overlapped < plan.times.seconds
    assert sum(predicted_causes(plan).values()) == pytest.approx(overlapped)


def test_ledger_reads_the_prediction(tmp_path: Path) -> None:
    plan = plan_of(MODEL, GPUS, *COLOCATED)
    (tmp_path / "launch").mkdir()
    write_prediction(plan, tmp_path)
    expected = {cause: pytest.approx(seconds, abs=6e-4) for cause, seconds in predicted_causes(plan).items()}
    assert read_ledger(tmp_path).predicted == expected
    assert json.loads((tmp_path / "launch/prediction.json").read_text()).keys() == expected.keys()
