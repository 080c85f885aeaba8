"""pass@k advantages, compared with enumeration of all k-subsets."""

from itertools import combinations
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages.pass_at_k import against_all, against_without, best_of_k, pass_at_k
from megarl.algorithms.baselines import Member

REWARDS = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=7)


def advantages(rewards: list[float], k: int, baseline: str = "all", **options: object) -> list[float]:
    options = {"std": "population", "std_epsilon": 0.0} | options
    compared = pass_at_k([Member(reward, 1) for reward in rewards], k, baseline, **options)
    return [(r - b.center) / b.scale for r, b in zip(rewards, compared, strict=True)]


@pytest.mark.parametrize(("baseline", "k_left"), [("all", 3), ("without", 4)])
def test_group_with_missing_reward_has_advantages(baseline, k_left):
    """k = 4 and 5 samples, one without a reward."""
    rewards = [1.0, 0.0, 0.5, 0.25]
    actual = advantages(rewards, 4, baseline, std="none")
    assert actual == pytest.approx(advantages(rewards, k_left, baseline, std="none"))
    assert any(actual)


@pytest.mark.parametrize(("num_lower", "num_best", "k"), [(0, 5, 4), (3, 2, 4), (1, 6, 3)])
def test_advantages_are_zero_if_every_subset_has_a_best(num_lower, num_best, k):
    rewards = [-4.3] * num_lower + [-3.0] * num_best
    assert advantages(rewards, k) == [0.0] * len(rewards)


@given(rewards=REWARDS, data=st.data())
def test_expectations_match_enumeration(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    sets = list(combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in members) for members in sets]
    chances = best_of_k(rewards, k)
    assert sum(chances) == pytest.approx(1)
    assert sum(p * r for p, r in zip(chances, rewards, strict=True)) == pytest.approx(fmean(best))
    differences, deviation = against_all(rewards, k)
    assert deviation == pytest.approx(pstdev(best), abs=1e-6)
    shares = against_without(rewards, k)
    for i in range(len(rewards)):
        own = [(value, members) for value, members in zip(best, sets, strict=True) if i in members]
        assert differences[i] == pytest.approx(fmean(value for value, _ in own) - fmean(best), abs=1e-9)
        without = [max((rewards[j] for j in members if j != i), default=0.0) for _, members in own]
        lead = sum(value - other for (value, _), other in zip(own, without, strict=True)) / len(sets)
        assert shares[i] == pytest.approx(lead, abs=1e-9)


def test_k_out_of_range_is_rejected():
    with pytest.raises(ValueError, match="k=3: k must be between 1 and the number of samples, 2"):
        against_all([1.0, 0.0], 3)
    with pytest.raises(ValueError, match="k=0: k must be between 1 and the number of samples, 2"):
        against_without([1.0, 0.0], 0)
