"""What samples are compared with: hand-worked groups, the definitions, and what an estimator does not see."""

from functools import cache
from itertools import combinations
from statistics import fmean, pstdev, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.baselines import Member, MovingAverage, amplification, group_baselines
from megarl.algorithms.pass_at_k import against_all, against_without, best_of_k
from megarl.config.load import load
from megarl.config.schema import Advantage
from megarl.core.types import TokenTotals
from tests.paths import BASE

REWARDS = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=7)


@cache
def config(**options: object) -> Advantage:
    given = [f"algorithm.advantage.{name}={value}" for name, value in options.items()]
    return load(BASE, ["model.path=m", "data.source=arithmetic", *given]).algorithm.advantage


def advantages(rewards: list[float], lengths: list[int] | None = None, **options: object) -> list[float]:
    group = [Member(r, n) for r, n in zip(rewards, lengths or [1] * len(rewards), strict=True)]
    baselines = group_baselines(config(**options), group)
    return [(r - b.value) / b.scale for r, b in zip(rewards, baselines, strict=True)]


@pytest.mark.parametrize(
    ("options", "expected"),
    # Rewards 1, 0, 0, 1 of lengths 1, 2, 3, 2: mean 1/2, squared deviations sum to 1, of the lengths 3/8 won.
    [
        (dict(estimator="grpo", std_epsilon=0.0), [3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2]),
        (dict(estimator="grpo", std="population", std_epsilon=0.0), [1, -1, -1, 1]),
        (dict(estimator="grpo", std="population", std_epsilon=0.5), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="grpo", std="none"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="reinforce_plus_plus_baseline"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="gpg"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (dict(estimator="opo"), [5 / 8, -3 / 8, -3 / 8, 5 / 8]),
        # Best of 2: 5 of the 6 pairs win. With a winner for sure: 1; a loser wins with 2 of 3 others.
        (dict(estimator="pass_at_k", k=2, std="none"), [1 / 6, -1 / 6, -1 / 6, 1 / 6]),
        (dict(estimator="pass_at_k", k=2, std_epsilon=0.0), [x / 5**0.5 for x in (1, -1, -1, 1)]),
        # Of the 6 pairs, each winner is in 2 that lose without it.
        (dict(estimator="pass_at_k", k=2, pass_at_k_baseline="without"), [1 / 3, 0, 0, 1 / 3]),
        (dict(estimator="pass_at_k", k=3, pass_at_k_baseline="without"), [1 / 4, 0, 0, 1 / 4]),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_by_hand(options, expected):
    assert advantages([1.0, 0.0, 0.0, 1.0], [1, 2, 3, 2], **options) == pytest.approx(expected)


@pytest.mark.parametrize(("baseline", "k_left"), [("all", 3), ("without", 4)])
def test_a_group_that_lacks_a_reward_still_tells_something(baseline, k_left):
    """k = 4 of 5 samples, of which one has no reward."""
    rewards = [1.0, 0.0, 0.5, 0.25]
    options = dict(estimator="pass_at_k", std="none", pass_at_k_baseline=baseline)
    found = advantages(rewards, k=4, **options)
    assert found == pytest.approx(advantages(rewards, k=k_left, **options))
    assert any(found)


GROUP = ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "pass_at_k"]


@pytest.mark.parametrize("estimator", GROUP)
def test_groups_of_one_and_of_equal_rewards(estimator):
    assert advantages([5.0], estimator=estimator) == [0.0]
    assert advantages([5.0], estimator=estimator, group_of_one="reward") == [5.0]
    assert advantages([0.7] * 5, estimator=estimator) == pytest.approx([0.0] * 5, abs=1e-6)


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, -2.3])
@pytest.mark.parametrize("num_samples", [2, 3, 6, 7])
def test_nothing_is_added_to_a_deviation_of_zero(std, reward, num_samples):
    """Means of equal rewards differ from them by rounding, which a deviation of nothing else would blow up."""
    equal = [reward] * num_samples
    assert advantages(equal, estimator="grpo", std=std, std_epsilon=0.0) == pytest.approx([0.0] * num_samples)
    assert advantages(equal, estimator="pass_at_k", k=2, std_epsilon=0.0) == pytest.approx([0.0] * num_samples)
    tokens = [Member(reward, 2, TokenTotals.of([0.5] * 2)) for _ in equal]
    for baseline in group_baselines(config(estimator="grpo", credit="to_go", std=std, std_epsilon=0.0), tokens):
        assert (baseline.token_value, baseline.token_scale) == (0.5, 1.0)


@pytest.mark.parametrize(("num_lower", "num_best", "k"), [(0, 5, 4), (3, 2, 4), (1, 6, 3)])
def test_where_every_set_of_k_has_one_of_the_best_nothing_is_better(num_lower, num_best, k):
    rewards = [-4.3] * num_lower + [-3.0] * num_best
    assert advantages(rewards, estimator="pass_at_k", k=k, std_epsilon=0.0) == [0.0] * len(rewards)


@pytest.mark.parametrize("credit", ["whole", "to_go"])
@pytest.mark.parametrize("estimator", GROUP)
def test_a_sample_alone_has_no_advantage_by_its_tokens_either(estimator, credit):
    [baseline] = group_baselines(config(estimator=estimator, credit=credit), [Member(5.0, 2, TokenTotals.of([1.0]))])
    assert (5.0 - baseline.value) / baseline.scale == 0
    assert (1.0 - baseline.token_value) / baseline.token_scale == 0


@pytest.mark.parametrize("estimator", GROUP)
@given(rewards=REWARDS, shift=st.floats(-5, 5), order=st.randoms(use_true_random=False))
def test_no_shift_is_seen_and_no_order(estimator, rewards, shift, order):
    options = dict(estimator=estimator, **({"k": 2} if estimator == "pass_at_k" else {}))
    lengths = [1 + i % 3 for i in range(len(rewards))]
    plain = advantages(rewards, lengths, **options)
    assert advantages([r + shift for r in rewards], lengths, **options) == pytest.approx(plain, abs=1e-6)
    places = list(range(len(rewards)))
    order.shuffle(places)
    moved = advantages([rewards[i] for i in places], [lengths[i] for i in places], **options)
    assert moved == pytest.approx([plain[i] for i in places], abs=1e-6)


@given(rewards=REWARDS, scale=st.floats(0.5, 4))
def test_grpo_does_not_see_the_scale_and_the_others_follow_it(rewards, scale):
    larger = [scale * r for r in rewards]
    if len(set(rewards)) > 1:
        options = dict(estimator="grpo", std_epsilon=0.0)
        assert advantages(larger, **options) == pytest.approx(advantages(rewards, **options), abs=1e-6)
    for estimator in ("rloo", "opo", "gpg"):
        expected = [scale * a for a in advantages(rewards, estimator=estimator)]
        assert advantages(larger, estimator=estimator) == pytest.approx(expected, abs=1e-6)


@given(rewards=REWARDS)
def test_the_means_are_those_of_the_standard_library(rewards):
    assert advantages(rewards, estimator="grpo", std_epsilon=1.0) == pytest.approx(
        [(r - fmean(rewards)) / (stdev(rewards) + 1) for r in rewards]
    )
    others = [fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert advantages(rewards, estimator="rloo") == pytest.approx([r - b for r, b in zip(rewards, others, strict=True)])


@given(rewards=REWARDS, data=st.data())
def test_the_best_of_k_by_counting_all_sets(rewards, data):
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


def test_more_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match="k=3: there are 2 samples"):
        against_all([1.0, 0.0], 3)
    with pytest.raises(ValueError, match="k=0: there are 2 samples"):
        against_without([1.0, 0.0], 0)


def test_rewards_of_tokens_are_compared_by_themselves():
    """Two samples: tokens with the rewards 1, 3 and 8, their mean 4, and those of the sample means 2 and 8."""
    group = [Member(1.0, 2, TokenTotals.of([1.0, 3.0])), Member(0.0, 1, TokenTotals.of([8.0]))]
    of_grpo = group_baselines(config(estimator="grpo", credit="to_go", std_epsilon=0.5), group)
    assert [(b.token_value, b.token_scale) for b in of_grpo] == [pytest.approx((4, 13**0.5 + 0.5))] * 2
    of_rloo = group_baselines(config(estimator="rloo", credit="to_go"), group)
    assert [(b.token_value, b.token_scale) for b in of_rloo] == [(8.0, 1.0), (2.0, 1.0)]
    of_opo = group_baselines(config(estimator="opo", credit="to_go"), group)
    assert [(b.token_value, b.token_scale) for b in of_opo] == [(4.0, 1.0)] * 2


def test_groups_without_a_gradient_are_made_up_for():
    def groups(*rewards: list[float]) -> list[list[Member]]:
        return [[Member(reward, 1) for reward in group] for group in rewards]

    assert amplification(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0])) == 7 / 5
    assert amplification(groups([1.0, 1.0])) == 1.0


@given(
    reward=st.integers(-30, 30).map(lambda tenths: tenths / 10),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_rewards_of_tokens_give_a_gradient_unless_all_are_equal(reward, lengths):
    equal = [Member(1.0, n, TokenTotals.of([reward] * n)) for n in lengths]
    unequal = [Member(1.0, 2, TokenTotals.of([0.0, 1.0]))] * 2
    assert amplification([equal]) == 1.0
    assert amplification([equal, unequal]) == (len(lengths) + 2) / 2


def test_the_moving_average_forgets_its_start():
    average = MovingAverage()
    assert average.value == 0.0
    for reward in (1.0, 0.0, 4.0):
        average.add(reward, 0.5)
    assert average.value == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 4) / 1.75)
    for _ in range(3):
        average.add(2.0, 0.0)
    assert average.value == 2.0
