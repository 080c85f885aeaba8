"""The moving average of rewards."""

import pytest

from megarl.algorithms.baselines import MovingAverage


def test_moving_average_is_unbiased_at_the_start():
    average = MovingAverage()
    assert average.value == 0.0
    for reward in (1.0, 0.0, 4.0):
        average.add(reward, 0.5)
    assert average.value == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 4) / 1.75)
    for _ in range(3):
        average.add(2.0, 0.0)
    assert average.value == 2.0


def test_decay_of_one_gives_the_plain_mean():
    average = MovingAverage()
    for reward in (1.0, 0.0, 4.0, -2.0):
        average.add(reward, 1.0)
    assert average.value == 3 / 4
