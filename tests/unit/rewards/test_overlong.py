"""DAPO's eq. 13 by hand: 100 tokens at most, the last 20 of them punished."""

import pytest

from megarl.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_penalty_by_hand(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)
