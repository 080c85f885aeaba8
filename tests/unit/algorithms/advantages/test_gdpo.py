"""GDPO's baselines: worked examples with several rewards, their weights, and the normalization over the step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.algorithms.advantages.gdpo import gdpo, step_moments
from megarl.algorithms.baselines import Member
from megarl.algorithms.registry import ESTIMATORS
from megarl.core.score import RewardPart

SPEC = ESTIMATORS["gdpo"]
PLAIN = dict(std="population", std_epsilon=0.0, step_std="none")


def member(*values: float, weights: Sequence[float] = (1.0, 1.0), rest: float = 0.0) -> Member:
    """Return a sample with these rewards. `rest` is the part of its total reward that is not among them."""
    parts = {f"r{k}": RewardPart(value, weight) for k, (value, weight) in enumerate(zip(values, weights, strict=True))}
    return Member(sum(part.weight * part.value for part in parts.values()) + rest, 1, parts=parts)


def advantages(group: Sequence[Member], **options: object) -> list[float]:
    baselines = gdpo(group, **PLAIN | options)
    return [(m.reward - b.center) / b.scale for m, b in zip(group, baselines, strict=True)]


def test_rewards_with_equal_sums_are_told_apart():
    """The sums are 1, 1, 0 and 2, so GRPO gives the first two advantage 0. The first reward is rarer than the second:
    1, 0, 0, 0 has mean 1/4 and variance 3/16; 0, 1, 0, 2 has mean 3/4 and variance 11/16."""
    group = [member(1, 0), member(0, 1), member(0, 0), member(0, 2)]
    first, second = 3**0.5 / 4, 11**0.5 / 4
    expected = [
        0.75 / first - 0.75 / second,
        -0.25 / first + 0.25 / second,
        -0.25 / first - 0.75 / second,
        -0.25 / first + 1.25 / second,
    ]
    assert advantages(group) == pytest.approx(expected)
    assert abs(expected[0] - expected[1]) > 1


def test_weights_apply_after_the_normalization():
    """A weight of −2 flips and doubles a reward's share, whatever the reward's scale."""
    for scale in (1.0, 100.0):
        group = [member(scale, 0, weights=(-2, 1)), member(0, 1, weights=(-2, 1))]
        assert advantages(group) == pytest.approx([-2 - 1, 2 + 1])


@pytest.mark.parametrize(
    ("std", "expected"), [("none", 0.5), ("sample", 0.5 / (0.5**0.5 + 0.1)), ("population", 5 / 6)]
)
def test_deviation_is_an_option(std, expected):
    assert advantages([member(1, 3), member(0, 3)], std=std, std_epsilon=0.1) == pytest.approx([expected, -expected])


def test_other_parts_of_the_reward_are_centered_only():
    """The KL of −0.1 and −0.3 is compared with its mean; the equal rewards add nothing."""
    assert advantages([member(2, 1, rest=-0.1), member(2, 1, rest=-0.3)]) == pytest.approx([0.1, -0.1])


def test_rounding_of_the_sum_is_no_part_of_the_reward():
    """0.1 + 0.2 differs from 0.3 in the last bit."""
    group = [member(0.1, 0.2), Member(0.3, 1, parts=member(0.1, 0.2).parts)]
    assert advantages(group) == [0.0, 0.0]


def test_total_reward_counts_as_one_without_parts():
    assert advantages([Member(5.0, 1), Member(1.0, 1)]) == pytest.approx([1, -1])


GROUPS = [[member(1, 0), member(0, 1), member(1, 1)], [member(3, 3)], [member(0, 4), member(2, 0)]]


@pytest.mark.parametrize("step_std", ["sample", "population"])
def test_step_moments_cover_groups_of_several_samples(step_std):
    found = [advantages(group) for group in (GROUPS[0], GROUPS[2])]
    every = [a for of_group in found for a in of_group]
    center = sum(every) / 5
    variance = sum((a - center) ** 2 for a in every) / (4 if step_std == "sample" else 5)
    options = dict(std="population", std_epsilon=0.0, step_std=step_std)
    assert step_moments(GROUPS, **options) == pytest.approx((center, variance**0.5))
    normalization = SPEC.normalization(GROUPS, dict(SPEC.options) | options)
    for group, of_group in zip((GROUPS[0], GROUPS[2]), found, strict=True):
        normalized = [normalization.apply(baseline) for baseline in gdpo(group, **options)]
        actual = [(m.reward - b.center) / b.scale for m, b in zip(group, normalized, strict=True)]
        assert actual == pytest.approx([(a - center) / variance**0.5 for a in of_group])
        assert {b.token_scale for b in normalized} == {normalization.scale}


def test_step_without_a_comparison_is_not_normalized():
    assert step_moments([[member(1, 0)], [member(0, 1)]], "sample", 1e-6, "sample") is None
    assert step_moments(GROUPS, "sample", 1e-6, "none") is None
    [alone] = SPEC.baselines(GROUPS[1], SPEC.options)
    normalized = SPEC.normalization(GROUPS, SPEC.options).apply(alone)
    assert (6.0 - normalized.center) / normalized.scale == 0


def test_equal_rewards_have_zero_advantage_in_the_step():
    """Without an epsilon, a tiny deviation would blow up."""
    groups = [[member(0.1, 0.7)] * 3, [member(0.3, 0.2)] * 3]
    assert step_moments(groups, "sample", 0.0, "sample") == (0.0, 1.0)
