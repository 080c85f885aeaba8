"""DAPO's eq. 13 computed by hand: at most 100 tokens, with a buffer of 20."""

import pytest

from megarl.rewards.length import overlong_penalty


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_overlong_penalty_equals_hand_computed_values(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)
