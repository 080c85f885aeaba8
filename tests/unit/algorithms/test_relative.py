"""Rewards against baselines on packed rows."""

import math

import torch

from megarl.algorithms.relative import sample_advantages, token_advantages

ROWS = torch.tensor([0, 0, 0, 0, 1, 2, 2])


def test_tokens_without_a_reward_are_not_compared():
    reward = torch.tensor([1.0, math.nan, 3.0, math.nan, math.nan, 5.0, 0.0])
    found = token_advantages(reward, ROWS, torch.tensor([1.0, 7.0, 3.0]), torch.tensor([1.0, 1.0, 2.0]))
    assert found.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 1.0, -1.5]


def test_samples_against_their_baselines():
    found = sample_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 4.0]))
    assert found.tolist() == [0.5, 0.5]
