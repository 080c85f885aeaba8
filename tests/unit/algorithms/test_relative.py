"""Rewards against baselines on packed rows, and what is still to come, against sums that are written out."""

import math
import random

import pytest
import torch

from megarl.algorithms.advantages import relative
from megarl.algorithms.advantages.returns import sum_of_sample, to_go
from megarl.algorithms.advantages.whitening import mean_and_std, whiten

ROWS = torch.tensor([0, 0, 0, 0, 1, 2, 2])
MASK = torch.tensor([True, False, True, True, False, True, True])


def test_what_is_to_come_counts_trained_tokens_only():
    reward = torch.tensor([1.0, 50.0, 2.0, 4.0, 70.0, 8.0, 16.0])
    torch.testing.assert_close(
        to_go(reward, MASK, ROWS, 0.5), torch.tensor([1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 4, 0, 8 + 0.5 * 16, 16])
    )
    assert sum_of_sample(reward, MASK, ROWS, 4).tolist() == [7.0, 0.0, 24.0, 0.0]


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_a_token_sees_the_rest_of_its_own_sample(gamma):
    source = random.Random(2)
    rows = sorted(source.randrange(6) for _ in range(60))
    mask = [source.random() < 0.7 for _ in rows]
    reward = [source.gauss(0, 1) for _ in rows]
    found = to_go(torch.tensor(reward), torch.tensor(mask), torch.tensor(rows), gamma)
    for t in range(60):
        later = [s for s in range(t, 60) if rows[s] == rows[t] and mask[s]] if mask[t] else []
        expected = sum(gamma**distance * reward[s] for distance, s in enumerate(later))
        assert float(found[t]) == pytest.approx(expected, abs=1e-5)


def test_tokens_without_a_reward_are_not_compared():
    reward = torch.tensor([1.0, math.nan, 3.0, math.nan, math.nan, 5.0, 0.0])
    found = relative.of_tokens(reward, ROWS, torch.tensor([1.0, 7.0, 3.0]), torch.tensor([1.0, 1.0, 2.0]))
    assert found.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 1.0, -1.5]


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_equal_advantages_are_whitened_to_nothing(value):
    """Their deviation is 0, and so may be what is added to it."""
    advantage = torch.full((3,), value)
    total, squares = float(advantage.double().sum()), float(advantage.double().square().sum())
    mean, std = mean_and_std(3, total, squares, "population")
    assert whiten(advantage, torch.ones(3).bool(), mean, std, 0.0).tolist() == [0.0] * 3


def test_samples_against_their_baselines():
    found = relative.of_samples(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 4.0]))
    assert found.tolist() == [0.5, 0.5]
