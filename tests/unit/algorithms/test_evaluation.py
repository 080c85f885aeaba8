"""Evaluation estimates compared with enumeration, closed forms and simulation."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from statistics import NormalDist, fmean

import pytest

from megarl.algorithms.evaluation import (
    Z,
    estimates,
    names,
    normal_interval,
    pass_all_k,
    pass_at_k,
    share_interval,
    wilson,
)
from tests.marks import exhaustive_but


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_rates_match_enumeration(n: int) -> None:
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            sets = list(combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, sets)))
            assert pass_all_k(n, c, k) == pytest.approx(fmean(map(all, sets)))


@pytest.mark.parametrize(("n", "k"), [(4, 2), (5, 3), (3, 3), (6, 1)])
def test_pass_rates_are_unbiased(n: int, k: int) -> None:
    """The expectation over n samples is the probability that any (pass@k) or all (pass^k) of k samples succeed."""
    p = 0.3
    outcomes = [
        (sum(outcome), p ** sum(outcome) * (1 - p) ** (n - sum(outcome))) for outcome in product((0, 1), repeat=n)
    ]
    assert math.fsum(chance * pass_at_k(n, c, k) for c, chance in outcomes) == pytest.approx(1 - (1 - p) ** k)
    assert math.fsum(chance * pass_all_k(n, c, k) for c, chance in outcomes) == pytest.approx(p**k)


def test_estimates_for_four_samples_per_prompt() -> None:
    actual = estimates([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], 4, success_above=0.5)
    assert list(actual) == names(4) == ["avg@4", "pass@1", "pass@2", "pass@4", "pass^2", "pass^4"]
    values = {name: estimate.value for name, estimate in actual.items()}
    assert values == pytest.approx(
        {"avg@4": 0.5, "pass@1": 0.5, "pass@2": (5 / 6 + 1) / 3, "pass@4": 2 / 3, "pass^2": 7 / 18, "pass^4": 1 / 3}
    )
    assert actual["avg@4"] == actual["pass@1"], "equal for scores of 0 and 1"
    assert all(estimate.low < estimate.value < estimate.high for estimate in actual.values())


def test_names_for_other_sample_counts() -> None:
    assert names(1) == ["avg@1", "pass@1"]
    assert names(6) == ["avg@6", "pass@1", "pass@2", "pass@4", "pass@6", "pass^2", "pass^4", "pass^6"]


def test_failed_samples_are_excluded() -> None:
    actual = estimates([[1, None, 1, None], [0, 1, 1, 0], [None] * 4], 4, success_above=0.5)
    assert actual["avg@4"].value == 0.75
    assert actual["pass@2"].value == pytest.approx((1 + 5 / 6) / 2), "pass@2 needs two scores"
    assert actual["pass@4"].value == 1.0 and actual["pass^4"].value == 0.0, "only one prompt has four scores"
    assert estimates([[None], [None]], 1, success_above=0.5) == {}


def test_success_requires_score_above_threshold() -> None:
    actual = estimates([[2.0], [0.9], [1.0]], 1, success_above=1.0)
    assert actual["pass@1"].value == pytest.approx(1 / 3) and actual["avg@1"].value == pytest.approx(1.3)


@pytest.mark.parametrize(("successes", "count"), [(0, 30), (1, 10), (37, 100), (10, 10), (81, 263)])
def test_interval_of_single_samples_is_wilsons(successes: int, count: int) -> None:
    """The ends solve the score test: each is Z standard errors away from the observed proportion."""
    low, high = share_interval([1.0] * successes + [0.0] * (count - successes), count)
    share = successes / count
    for end in {low, high} - {0.0, 1.0}:
        assert (share - end) ** 2 == pytest.approx(Z * Z * end * (1 - end) / count)
    assert (low == 0) == (successes == 0) and (high == 1) == (successes == count)


def test_z_is_the_95_percent_quantile() -> None:
    assert pytest.approx(NormalDist().inv_cdf(0.975)) == Z


def test_identical_samples_of_a_prompt_count_once() -> None:
    scores = [[score] * 8 for score in (1, 0, 0, 1, 1, 0, 1, 1, 1, 0)]
    actual = estimates(scores, 8, success_above=0.5)["pass@1"]
    assert (actual.low, actual.high) == pytest.approx(wilson(0.6, 10))


def test_effective_draws_are_at_most_the_samples() -> None:
    actual = estimates([[1, 0]] * 20, 2, success_above=0.5)["pass@1"]
    assert (actual.low, actual.high) == pytest.approx(wilson(0.5, 40))


def test_continuous_scores_have_the_normal_interval() -> None:
    assert normal_interval([2.0, 4.0, 6.0]) == pytest.approx((4 - Z * 2 / math.sqrt(3), 4 + Z * 2 / math.sqrt(3)))
    assert normal_interval([2.0]) == (-math.inf, math.inf)
    actual = estimates([[0.2, 0.4], [0.5, 0.7]], 2, success_above=0.5)["avg@2"]
    assert (actual.low, actual.high) == pytest.approx(normal_interval([0.3, 0.6]))


@pytest.mark.parametrize("name", exhaustive_but(["avg@4", "pass@2", "pass@4", "pass^2"], "avg@4", "pass@2", "pass^2"))
def test_intervals_cover_the_truth_in_95_percent(name: str) -> None:
    """60 prompts of different difficulty; the samples of a prompt share its success probability."""
    draw = random.Random(0)
    truth = {"avg@4": 1 / 2, "pass@2": 1 - 1 / 3, "pass@4": 1 - 1 / 5, "pass^2": 1 / 3}[name]  # for uniformly drawn p
    held = 0
    for _ in range(1000):
        chances = [draw.random() for _ in range(60)]
        scores = [[float(draw.random() < p) for _ in range(4)] for p in chances]
        actual = estimates(scores, 4, success_above=0.5)[name]
        held += actual.low <= truth <= actual.high
    assert 930 <= held <= 970
