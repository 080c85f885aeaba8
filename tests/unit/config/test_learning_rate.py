"""Schedules against closed forms and against transformers' schedulers."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from megarl.config.learning_rate import learning_rate
from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import BASE

PEAK, TOTAL = 0.3, 40


def rates(*overrides: str, total: int = TOTAL) -> list[float]:
    """Return the learning rates of all updates and of two more beyond the end of the run."""
    optimizer = recipe(*overrides).actor.optimizer
    return [learning_rate(optimizer, done, total) for done in range(total + 2)]


def recipe(*overrides: str) -> Config:
    schedule = [f"actor.optimizer.schedule.{override}" for override in overrides]
    return load(BASE, ["model.path=x", "data.source=arithmetic", f"actor.optimizer.lr={PEAK}", *schedule])


def transformers_rates(make, **arguments) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, num_training_steps=TOTAL, **arguments)
    found = []
    for _ in range(TOTAL + 2):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


THEIRS = {
    "linear": (transformers.get_linear_schedule_with_warmup, {}),
    "cosine": (transformers.get_cosine_with_min_lr_schedule_with_warmup, {"min_lr": 0.03}),
    "wsd": (
        transformers.get_wsd_schedule,
        {"min_lr_ratio": 0.1, "num_decay_steps": 10, "decay_type": "1-sqrt"},
    ),
}


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", THEIRS)
def test_decay_equals_transformers(name, warmup):
    make, arguments = THEIRS[name]
    overrides = [f"name={name}", f"warmup={warmup}"]
    overrides += [] if name == "linear" else ["min_lr=0.03"]
    overrides += ["decay=10"] if name == "wsd" else []
    reference = transformers_rates(make, num_warmup_steps=warmup, **arguments)
    within = slice(warmup, TOTAL + 1)  # excludes updates after the run, in which transformers' cosine rises again
    assert rates(*overrides)[within] == pytest.approx(reference[within], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warmup_is_one_update_ahead_of_transformers(name):
    """The first update of transformers has a learning rate of 0."""
    reference = transformers_rates(transformers.get_linear_schedule_with_warmup, num_warmup_steps=5)
    assert rates(f"name={name}", "warmup=5")[:5] == pytest.approx(reference[1:6])


def test_schedules_match_closed_forms():
    assert rates() == [PEAK] * (TOTAL + 2)
    assert rates("warmup=2") == [PEAK / 2] + [PEAK] * (TOTAL + 1)
    linear = rates("name=linear", "min_lr=0.1")
    assert linear[TOTAL // 2] == pytest.approx(0.2)
    assert linear[-2:] == pytest.approx([0.1, 0.1])
    cosine = rates("name=cosine", "warmup=4")
    assert cosine[4 + 9] == pytest.approx(PEAK * (1 + math.cos(math.pi / 4)) / 2)  # after 9 of 36 updates
    wsd = rates("name=wsd", "decay=16", "warmup=8")
    assert wsd[7:25] == [PEAK] * 18  # from the last warm-up update to the first decay update
    assert wsd[24 + 4] == pytest.approx(PEAK / 2)
    assert wsd[-2:] == pytest.approx([0, 0])


def test_length_below_one_is_a_fraction_of_the_run():
    by_share = rates("name=wsd", "warmup=0.1", "decay=0.25")
    assert by_share == rates("name=wsd", "warmup=4", "decay=10")


def test_length_of_one_is_one_update():
    assert rates("warmup=1") == [PEAK] * (TOTAL + 2)


def test_warmup_longer_than_the_run_rises_to_its_end():
    assert rates("name=cosine", "warmup=80")[:TOTAL] == pytest.approx([PEAK * n / 80 for n in range(1, TOTAL + 1)])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_run_of_one_update(name):
    decay = ["decay=0.5"] if name == "wsd" else []
    assert rates(f"name={name}", *decay, total=1)[0] == PEAK


def test_number_of_updates_of_a_run():
    steps = ["run.steps=7", "batch.prompts_per_step=12", "batch.prompts_per_update=4"]
    config = load(BASE, ["model.path=x", "data.source=arithmetic", *steps])
    assert config.num_updates(config.actor) == 21
    warming = ["algorithm.advantage.estimator=gae", "critic.warmup_steps=2"]
    config = load(BASE, ["model.path=x", "data.source=arithmetic", *steps, *warming])
    assert config.num_updates(config.actor) == 15
    assert config.num_updates(config.critic) == 21
    more = ["batch.epochs=4", "implicit_reward.coefficient=1.0"]
    config = load(BASE, ["model.path=x", "data.source=arithmetic", *steps, *warming, *more])
    assert [config.num_updates(trained) for trained in config.all_trained] == [60, 84, 21]
