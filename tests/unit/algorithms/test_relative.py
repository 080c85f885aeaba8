"""Advantages relative to baselines, on packed rows."""

import math

import torch

from megarl.algorithms.relative import sample_advantages, token_advantages

ROWS = torch.tensor([0, 0, 0, 0, 1, 2, 2])


def test_tokens_without_reward_have_zero_advantage():
    reward = torch.tensor([1.0, math.nan, 3.0, math.nan, math.nan, 5.0, 0.0])
    actual = token_advantages(reward, ROWS, torch.tensor([1.0, 7.0, 3.0]), torch.tensor([1.0, 1.0, 2.0]))
    assert actual.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 1.0, -1.5]


def test_sample_advantages_match_worked_example():
    actual = sample_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 4.0]))
    assert actual.tolist() == [0.5, 0.5]


def test_limit_clamps_advantages():
    reward, zero, one = torch.tensor([-7.0, 2.0, 9.0]), torch.zeros(3), torch.ones(3)
    assert sample_advantages(reward, zero, one, limit=5.0).tolist() == [-5.0, 2.0, 5.0]
