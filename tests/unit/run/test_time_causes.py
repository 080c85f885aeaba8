"""Tests of the attribution of an interval to causes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.placement import place
from megarl.cluster.trace import Span
from megarl.config.load import load
from megarl.run.time_causes import CAUSES, Devices, start_seconds, step_seconds
from tests.paths import BASE

KINDS = Devices(shared=2, engines=4, trainers=8, unused=1)


def driver(*phases: tuple[str, float, float]) -> list[Span]:
    return [Span("driver", task, begin, end) for task, begin, end in phases]


STEP = driver(
    ("save", 0, 1),
    ("rollout", 1, 11),
    ("reward", 11, 12),
    ("train", 12, 17),
    ("refit", 17, 19),
    ("evaluation", 19, 20),
    ("step 4", 1, 20),
)


def test_devices_wait_for_the_roles_that_work() -> None:
    assert step_seconds(0, 21, STEP, KINDS, sampling_s=4.0) == {
        "rollout": 4 * 6,
        "long_rollouts": 6 * 6,
        "idle_trainers": 10 * 8,
        "reward": 14,
        "train": 5 * 10,
        "idle_engines": 5 * 4,
        "refit": 2 * 14,
        "evaluation": 14,
        "checkpoint": 14,
        "driver": 14,
        "spare": 21,
    }


def test_engines_sample_while_models_train() -> None:
    """The engines sampled for 8.5 of the 17 s in which they do not receive weights or evaluate."""
    devices = Devices(engines=4, trainers=8, samples_while_training=True)
    found = step_seconds(0, 21, STEP, devices, sampling_s=8.5)
    assert found["rollout"] == pytest.approx(8.5 * 4)
    assert found["long_rollouts"] == pytest.approx(5 * 4)
    assert found["idle_engines"] == pytest.approx(2.5 * 4)
    assert found["train"] == 5 * 8


def test_engines_sample_between_the_phases_of_a_step() -> None:
    """They sampled for half of the step, which has gaps before and after training."""
    spans = driver(("rollout", 0, 2), ("train", 4, 8), ("step 1", 0, 10))
    found = step_seconds(0, 10, spans, Devices(engines=1, samples_while_training=True), sampling_s=5.0)
    assert found == {"rollout": 5, "long_rollouts": 1, "idle_engines": 2, "driver": 2}


@pytest.mark.parametrize(("sampling_s", "sampled"), [(-1.0, 0), (0.0, 0), (50.0, 10), (None, 10)])
def test_sampling_takes_at_most_the_phase(sampling_s: float | None, sampled: float) -> None:
    found = step_seconds(0, 10, driver(("rollout", 0, 10)), Devices(engines=1), sampling_s)
    assert (found.get("rollout", 0), found.get("long_rollouts", 0)) == (sampled, 10 - sampled)


def test_work_before_a_recovery_is_done_again() -> None:
    spans = driver(
        ("save", 0, 2),
        ("rollout", 2, 6),
        ("detect", 9, 10),
        ("recover: processes", 10, 12),
        ("recover: state", 12, 15),
        ("train", 15, 20),
        ("refit", 20, 21),
    )
    assert step_seconds(0, 21, spans, Devices(shared=2)) == {
        "checkpoint": 4,
        "rollout": 8,
        "repeated": 2 * 3,
        "detection": 2,
        "restart/in place": 10,
        "train": 10,
        "refit": 2,
    }


def test_steps_that_are_trained_again_are_repeated() -> None:
    spans = driver(
        ("rollout", 0, 4), ("recover", 5, 7), ("repeat step 4", 7, 9), ("repeat step 5", 9, 12), ("train", 12, 15)
    )
    assert step_seconds(0, 15, spans, Devices(shared=1)) == {
        "rollout": 4,
        "repeated": 1 + 2 + 3,
        "restart/in place": 2,
        "train": 3,
    }


def test_no_work_before_a_move_is_done_again() -> None:
    spans = driver(("train", 0, 5), ("move", 6, 10), ("refit", 10, 12))
    assert step_seconds(0, 12, spans, Devices(shared=1)) == {
        "train": 5,
        "driver": 1,
        "restart/in place": 4,
        "refit": 2,
    }


def test_an_interval_without_phases_is_unexplained() -> None:
    other = [Span("trainer-0", "update", 0, 5)]
    assert step_seconds(0, 5, other, KINDS) == {"unexplained": 5 * 14, "spare": 5}


def test_start_waits_for_the_model_that_is_loaded_last() -> None:
    spans = [
        Span("engine-0", "start", 2, 2.5),
        Span("engine-1", "start", 4, 9),
        Span("trainer-0", "start", 3, 7),
        Span("trainer-1", "start", 3, 10),
    ]
    spans.append(Span("rewards-0", "start", 10, 30))
    assert start_seconds(0, 12, spans, Devices(shared=1), "workers") == {
        "startup/workers": 4.5,
        "startup/engines": 0.5,
        "startup/models": 7,
    }
    assert start_seconds(0, 12, spans, Devices(shared=1), "ray") == {"startup/ray": 12}


TASKS = [
    "rollout",
    "reward",
    "train",
    "refit",
    "save",
    "evaluation",
    "detect",
    "recover state",
    "move",
    "step 3",
    "other",
]
TIMES = st.floats(-5, 25)
SPANS = st.lists(st.builds(Span, st.sampled_from(["driver", "engine-1"]), st.sampled_from(TASKS), TIMES, TIMES))
COUNT = st.integers(0, 5)
DEVICES = st.builds(Devices, COUNT, COUNT, COUNT, COUNT, st.booleans())


@given(SPANS, DEVICES, st.none() | st.floats(-1, 50))
def test_causes_add_up_to_the_interval(spans: list[Span], devices: Devices, sampling_s: float | None) -> None:
    for seconds in (step_seconds(0, 20, spans, devices, sampling_s), start_seconds(0, 20, spans, devices, "workers")):
        assert sum(seconds.values()) == pytest.approx(20 * devices.total)
        assert {cause.partition("/")[0] for cause in seconds} <= CAUSES.keys()
        assert all(value > 0 for value in seconds.values())


def test_overlapping_phases_equal_a_sampled_timeline() -> None:
    """The reference looks up the cause at many points in time."""
    source = random.Random(3)
    spans = driver(*((task, at := source.uniform(0, 15), at + source.uniform(0, 5)) for task in TASKS[:6]))
    found = step_seconds(0, 20, spans, Devices(shared=1))
    causes = dict(zip(TASKS[:6], ["rollout", "reward", "train", "refit", "checkpoint", "evaluation"], strict=True))
    points = 20_000
    sampled: dict[str, float] = {}
    for i in range(points):
        at = 20 * (i + 0.5) / points
        over = [span for span in spans if span.begin <= at < span.end]
        cause = causes[max(over, key=lambda span: span.begin).task] if over else "driver"
        sampled[cause] = sampled.get(cause, 0.0) + 20 / points
    assert found == pytest.approx(sampled, abs=0.01)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.layout.dp=2", "rollout.replicas=2"], Devices(shared=2, unused=6)),
        (["actor.layout.dp=4", "rollout.replicas=2"], Devices(shared=2, trainers=2, unused=4)),
        (
            ["actor.layout.dp=2", "rollout.tp=2", "rollout.replicas=2", "cluster.placement=disaggregated"],
            Devices(engines=4, trainers=2, unused=2),
        ),
    ],
)
def test_devices_of_a_placement(overrides: list[str], expected: Devices) -> None:
    required = ["model.path=m", "data.source=arithmetic", "batch.prompts_per_step=4", "batch.prompts_per_update=4"]
    config = load(BASE, [*required, "rollout.sleep=false", *overrides])
    assert Devices.of(place(config, cores=8, on_gpus=True, gpus_per_node=8), False) == expected
