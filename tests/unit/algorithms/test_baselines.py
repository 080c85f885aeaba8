"""The moving average of rewards, which estimators of whole samples share."""

import pytest

from megarl.algorithms.baselines import MovingAverage


def test_the_moving_average_forgets_its_start():
    average = MovingAverage()
    assert average.value == 0.0
    for reward in (1.0, 0.0, 4.0):
        average.add(reward, 0.5)
    assert average.value == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 4) / 1.75)
    for _ in range(3):
        average.add(2.0, 0.0)
    assert average.value == 2.0


def test_a_decay_of_one_is_the_plain_mean():
    average = MovingAverage()
    for reward in (1.0, 0.0, 4.0, -2.0):
        average.add(reward, 1.0)
    assert average.value == 3 / 4
