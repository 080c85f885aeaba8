"""Simulated steps compared with times computed by hand."""

from __future__ import annotations

from itertools import cycle

import pytest

from megarl.planner.simulation import Speeds, log_normal_lengths, recorded_lengths, simulate


def speeds(train: float, refit: float = 1.0, replicas: int = 1, concurrent: int = 64) -> Speeds:
    """Return speeds with engine steps of 0.1 s at any batch size."""
    return Speeds(replicas, concurrent, lambda _: 0.1, train, refit)


def test_synchronous_step_is_the_sum_of_its_phases():
    found = simulate(speeds(train=20), 4, 0, lambda: [100, 200])
    assert found.step_seconds == pytest.approx(200 * 0.1 + 20 + 1)
    assert found.engines_idle == pytest.approx(21 / 41) and found.trainers_idle == pytest.approx(21 / 41)
    assert (found.mean_age, found.largest_age) == (0, 0)


@pytest.mark.parametrize("train", [30, 8])
def test_one_step_off_takes_the_slower_side(train):
    """The engine fits exactly the samples of one step, which take 20 s."""
    found = simulate(speeds(train, concurrent=8), 4, 1, lambda: [200, 200])
    assert found.step_seconds == pytest.approx(max(train, 20) + 1)
    assert found.largest_age == 1
    assert found.trainers_idle == pytest.approx(1 - train / found.step_seconds)


@pytest.mark.parametrize(
    ("lengths", "sampling"),
    [
        pytest.param((10, 10, 10, 10, 100), 1.0, id="slow_prompt_is_dropped"),
        # A step's first prompt is the restarted one that an earlier step dropped. The step waits for this prompt.
        pytest.param((100, 10, 10, 10, 10), 10.0, id="restarted_prompt_is_waited_for"),
    ],
)
def test_oversampling_drops_the_slowest_prompts(lengths, sampling):
    """A step starts five prompts and trains on four."""
    draws = cycle([[length] for length in lengths])
    found = simulate(speeds(train=20), 4, 0, lambda: next(draws), num_ahead=1, drops=True)
    assert found.step_seconds == pytest.approx(sampling + 20 + 1)
    assert found.dropped == pytest.approx(1 / 5) and found.largest_age == 0
    assert simulate(speeds(train=20), 4, 0, lambda: [100]).dropped == 0


def test_stale_rollouts_are_dropped_instead_of_waited_for():
    """One of eight responses takes 16 steps of the trainer. The others finish while the models train."""
    found = []
    for drops in (False, True):
        draws = cycle([[1600], *[[50]] * 7])
        found.append(simulate(speeds(train=9), 4, 1, lambda draws=draws: next(draws), steps=64, drops=drops))
    waiting, dropping = found
    assert waiting.dropped == 0 < dropping.dropped < 0.5
    assert max(waiting.largest_age, dropping.largest_age) <= 1


def test_dropped_sequences_free_the_engine():
    """The engine has two slots. The next step's sequences start immediately, because the dropped ones are aborted."""
    draws = cycle([[10], [1000]])
    found = simulate(speeds(train=0, refit=0, concurrent=2), 1, 0, lambda: next(draws), num_ahead=1, drops=True)
    assert found.step_seconds == pytest.approx(1.0)


def test_sequences_beyond_capacity_are_queued():
    assert simulate(speeds(train=0, refit=0, concurrent=2), 4, 0, lambda: [100]).step_seconds == pytest.approx(20)
    both = simulate(speeds(train=0, refit=0, concurrent=2, replicas=2), 4, 0, lambda: [100])
    assert both.step_seconds == pytest.approx(10) and both.engines_idle == pytest.approx(0)


def test_staleness_keeps_engines_busy_despite_long_responses():
    lengths = [log_normal_lengths(1000, 8000, samples=8) for _ in range(2)]
    in_turn = simulate(speeds(train=400, replicas=4), 32, 0, lengths[0])
    ahead = simulate(speeds(train=400, replicas=4), 32, 2, lengths[1])
    assert in_turn.engines_idle > 0.4 and ahead.engines_idle < 0.05
    assert 0 < ahead.mean_age <= ahead.largest_age <= 2


def test_drawn_lengths_have_the_requested_distribution():
    draw = log_normal_lengths(1000, 100_000, samples=20_000)
    drawn = draw()
    assert sum(drawn) / len(drawn) == pytest.approx(1000, rel=0.05) and min(drawn) >= 1
    assert max(log_normal_lengths(1000, 1500, samples=1000)()) == 1500
    assert set(recorded_lengths([3, 5], 100)()) == {3, 5}


def test_colocated_overlap_saves_only_the_tail():
    """Eight sequences fit at once. Synchronously, slots of short responses stay empty until the long ones finish."""
    alike = [simulate(speeds(train=20, concurrent=8), 4, n, lambda: [200, 200], is_colocated=True) for n in (0, 1)]
    assert [found.step_seconds for found in alike] == pytest.approx([20 + 21, 20 + 21])
    in_turn, ahead = (
        simulate(speeds(train=20, concurrent=8), 4, n, lambda: [100, 300], is_colocated=True) for n in (0, 1)
    )
    assert in_turn.step_seconds == pytest.approx(30 + 21)
    assert ahead.step_seconds == pytest.approx(20 + 21, rel=0.05) and ahead.largest_age == 1
    assert ahead.engines_idle == pytest.approx(21 / 41, rel=0.05), "engines pause while the models train"


@pytest.mark.parametrize(
    ("train", "is_colocated", "recompute", "seconds"),
    [
        (4, True, lambda _: 3, 20 + 4 + 3),
        (10, False, lambda tokens: 0.05 * tokens, 20 + 0.05 * 100),
    ],
    ids=["in turns", "half of the response is sampled before the refit"],
)
def test_engines_recompute_running_sequences_after_a_refit(train, is_colocated, recompute, seconds):
    """The engine samples one response of 20 s at a time and has started the next one when a step ends."""
    given = Speeds(1, 1, lambda _: 0.1, train, 0.0, recompute)
    assert simulate(given, 1, 1, lambda: [200], is_colocated=is_colocated).step_seconds == pytest.approx(seconds)
