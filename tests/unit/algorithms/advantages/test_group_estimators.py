"""Baselines of group estimators: worked examples, definitions, and invariances."""

from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages.gpg import amplification
from megarl.algorithms.advantages.grpo import step_scale
from megarl.algorithms.baselines import Member
from megarl.algorithms.registry import ESTIMATORS
from megarl.core.score import Baseline, TokenTotals

GROUP_ESTIMATORS = [name for name, spec in ESTIMATORS.items() if spec.compares_samples]
REWARDS = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=7)


def baselines(group: list[Member], estimator: str, **options: object) -> list[Baseline]:
    spec = ESTIMATORS[estimator]
    assert options.keys() <= spec.options.keys()
    return spec.baselines(group, dict(spec.options) | options)


def advantages(rewards: list[float], lengths: list[int] | None = None, **options: object) -> list[float]:
    group = [Member(r, n) for r, n in zip(rewards, lengths or [1] * len(rewards), strict=True)]
    return [(r - b.center) / b.scale for r, b in zip(rewards, baselines(group, **options), strict=True)]


@pytest.mark.parametrize(
    ("options", "expected"),
    # Rewards 1, 0, 0, 1 with lengths 1, 2, 3, 2: mean 1/2, squared deviations sum to 1, length-weighted mean 3/8.
    [
        (dict(estimator="grpo", std_epsilon=0.0), [3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2]),
        (dict(estimator="grpo", std="population", std_epsilon=0.0), [1, -1, -1, 1]),
        (dict(estimator="grpo", std="population", std_epsilon=0.5), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="grpo", std="none"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="reinforce_plus_plus_baseline"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="gpg"), [0.5, -0.5, -0.5, 0.5]),
        (dict(estimator="rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        # Among a sample's 3 peers, 1 (for a winner) or 2 (for a loser) are winners: squared deviations sum to 2/3.
        (
            dict(estimator="rloo", std="sample", std_epsilon=0.0),
            [2 / 3 * 3**0.5, *[-2 / 3 * 3**0.5] * 2, 2 / 3 * 3**0.5],
        ),
        (dict(estimator="rloo", std="population", std_epsilon=0.0), [2**0.5, -(2**0.5), -(2**0.5), 2**0.5]),
        (dict(estimator="opo"), [5 / 8, -3 / 8, -3 / 8, 5 / 8]),
        # Best of 2: 5 of 6 pairs contain a winner. So do all pairs with a given winner, and 2 of 3 with a given loser.
        (dict(estimator="pass_at_k", k=2, std="none"), [1 / 6, -1 / 6, -1 / 6, 1 / 6]),
        (dict(estimator="pass_at_k", k=2, std_epsilon=0.0), [x / 5**0.5 for x in (1, -1, -1, 1)]),
        # Each winner is in 2 of the 6 pairs that lose without it.
        (dict(estimator="pass_at_k", k=2, pass_at_k_baseline="without"), [1 / 3, 0, 0, 1 / 3]),
        (dict(estimator="pass_at_k", k=3, pass_at_k_baseline="without"), [1 / 4, 0, 0, 1 / 4]),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_advantages_match_worked_example(options, expected):
    assert advantages([1.0, 0.0, 0.0, 1.0], [1, 2, 3, 2], **options) == pytest.approx(expected)


def test_step_std_uses_raw_rewards_of_all_groups():
    """Rewards 1, 3 | 5 | 5, 5, 5 have mean 4 and squared deviations 9 + 1 + 4·1; the group means play no role."""
    groups = [[Member(reward, 1) for reward in rewards] for rewards in ((1.0, 3.0), (5.0,), (5.0, 5.0, 5.0))]
    for std, divisor in (("population", 6), ("sample", 5)):
        assert step_scale(groups, std, 0.1) == pytest.approx((14 / divisor) ** 0.5 + 0.1)
    assert step_scale([[Member(0.7, 1)] * 3] * 2, "sample", 0.0) == 1.0


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_single_or_equal_rewards_have_zero_advantage(estimator):
    assert advantages([5.0], estimator=estimator) == [0.0]
    assert advantages([5.0], estimator=estimator, group_of_one="reward") == [5.0]
    assert advantages([0.7] * 5, estimator=estimator) == pytest.approx([0.0] * 5, abs=1e-6)


def test_rloo_skips_scaling_if_others_are_equal():
    """The only winner of four is compared with three equal rewards."""
    actual = advantages([1.0, 0.0, 0.0, 0.0], estimator="rloo", std="sample", std_epsilon=0.0)
    assert actual == pytest.approx([1.0, *[-(1 / 3) / (1 / 3) ** 0.5] * 3])
    assert advantages([1.0, 0.0], estimator="rloo", std="sample") == [1.0, -1.0]


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, -2.3])
@pytest.mark.parametrize("num_samples", [2, 3, 6, 7])
def test_equal_rewards_have_exactly_zero_advantage(std, reward, num_samples):
    """Rounding must not make the mean of equal rewards differ from them, because dividing by a tiny deviation would
    amplify the difference."""
    equal = [reward] * num_samples
    assert advantages(equal, estimator="grpo", std=std, std_epsilon=0.0) == [0.0] * num_samples
    assert advantages(equal, estimator="rloo") == [0.0] * num_samples
    assert advantages(equal, estimator="pass_at_k", k=2, std_epsilon=0.0) == pytest.approx([0.0] * num_samples)
    tokens = [Member(reward, 2, TokenTotals.of([0.5] * 2)) for _ in equal]
    for baseline in baselines(tokens, "grpo", credit="reward_to_go", std=std, std_epsilon=0.0):
        assert (baseline.token_center, baseline.token_scale) == (0.5, 1.0)


@pytest.mark.parametrize("credit", ["whole", "reward_to_go"])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_single_sample_has_zero_token_advantage(estimator, credit):
    [baseline] = baselines([Member(5.0, 2, TokenTotals.of([1.0]))], estimator, credit=credit)
    assert (5.0 - baseline.center) / baseline.scale == 0
    assert (1.0 - baseline.token_center) / baseline.token_scale == 0


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(rewards=REWARDS, shift=st.floats(-5, 5), order=st.randoms(use_true_random=False))
def test_advantages_ignore_reward_shift_and_sample_order(estimator, rewards, shift, order):
    options = dict(estimator=estimator, **({"k": 2} if estimator == "pass_at_k" else {}))
    lengths = [1 + i % 3 for i in range(len(rewards))]
    plain = advantages(rewards, lengths, **options)
    assert advantages([r + shift for r in rewards], lengths, **options) == pytest.approx(plain, abs=1e-6)
    places = list(range(len(rewards)))
    order.shuffle(places)
    moved = advantages([rewards[i] for i in places], [lengths[i] for i in places], **options)
    assert moved == pytest.approx([plain[i] for i in places], abs=1e-6)


@given(rewards=REWARDS, scale=st.floats(0.5, 4))
def test_scaling_rewards_scales_all_but_grpo(rewards, scale):
    larger = [scale * r for r in rewards]
    if len(set(rewards)) > 1:
        options = dict(estimator="grpo", std_epsilon=0.0)
        assert advantages(larger, **options) == pytest.approx(advantages(rewards, **options), abs=1e-6)
    for estimator in ("rloo", "opo", "gpg"):
        expected = [scale * a for a in advantages(rewards, estimator=estimator)]
        assert advantages(larger, estimator=estimator) == pytest.approx(expected, abs=1e-6)


@given(rewards=REWARDS)
def test_grpo_and_rloo_match_statistics_module(rewards):
    assert advantages(rewards, estimator="grpo", std_epsilon=1.0) == pytest.approx(
        [(r - fmean(rewards)) / (stdev(rewards) + 1) for r in rewards]
    )
    others = [fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert advantages(rewards, estimator="rloo") == pytest.approx([r - b for r, b in zip(rewards, others, strict=True)])


def test_token_rewards_have_their_own_baseline():
    """Two samples with token rewards 1, 3 and 8. The token mean is 4; the sample means are 2 and 8."""
    group = [Member(1.0, 2, TokenTotals.of([1.0, 3.0])), Member(0.0, 1, TokenTotals.of([8.0]))]
    grpo = baselines(group, "grpo", credit="reward_to_go", std_epsilon=0.5)
    assert [(b.token_center, b.token_scale) for b in grpo] == [pytest.approx((4, 13**0.5 + 0.5))] * 2
    rloo = baselines(group, "rloo", credit="reward_to_go")
    assert [(b.token_center, b.token_scale) for b in rloo] == [(8.0, 1.0), (2.0, 1.0)]
    opo = baselines(group, "opo", credit="reward_to_go")
    assert [(b.token_center, b.token_scale) for b in opo] == [(4.0, 1.0)] * 2


def test_gpg_amplifies_to_offset_uniform_groups():
    def groups(*rewards: list[float]) -> list[list[Member]]:
        return [[Member(reward, 1) for reward in group] for group in rewards]

    assert amplification(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0])) == 7 / 5
    assert amplification(groups([1.0, 1.0])) == 1.0


@given(
    reward=st.integers(-30, 30).map(lambda tenths: tenths / 10),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_unequal_token_rewards_count_as_gradient(reward, lengths):
    equal = [Member(1.0, n, TokenTotals.of([reward] * n)) for n in lengths]
    unequal = [Member(1.0, 2, TokenTotals.of([0.0, 1.0]))] * 2
    assert amplification([equal]) == 1.0
    assert amplification([equal, unequal]) == (len(lengths) + 2) / 2
