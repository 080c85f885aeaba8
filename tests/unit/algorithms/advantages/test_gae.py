"""Generalised advantages on packed rows against the definition, one sample at a time."""

import random

import pytest
import torch

from megarl.algorithms.advantages.gae import gae, length_adaptive_lambda


def by_definition(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Eq. 16 of arXiv 1506.02438, every sum written out; after the last action nothing follows."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [
        sum((gamma * gae_lambda) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def packed(lengths: list[int], seed: int):
    """Random rewards, values and masks: holes anywhere, and a sample without a trained token."""
    source = random.Random(seed)
    n = sum(lengths)
    mask = [source.random() < 0.7 for _ in range(n)]
    if len(lengths) > 2:
        start = sum(lengths[:2])
        mask[start : start + lengths[2]] = [False] * lengths[2]
    rows = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    reward, value = (torch.tensor([source.gauss(0, 1) for _ in range(n)]) for _ in range(2))
    return reward, value, torch.tensor(mask, dtype=torch.bool), rows


@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 4, 17, 2], [64, 65, 3]])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 0.5)])
def test_packed_rows_equal_the_definition(lengths, gamma, gae_lambda):
    reward, value, mask, rows = packed(lengths, seed=len(lengths))
    advantage, returns = gae(reward, mask, rows, value, gamma, gae_lambda)
    for i in range(len(lengths)):
        own = (rows == i) & mask
        expected = torch.tensor(by_definition(reward[own].tolist(), value[own].tolist(), gamma, gae_lambda))
        torch.testing.assert_close(advantage[own], expected)
        torch.testing.assert_close(returns[own], expected + value[own])
    assert not advantage[~mask].any() and not returns[~mask].any()


def test_the_critic_may_have_another_lambda():
    reward, value, mask, rows = packed([7, 4, 3, 9], seed=5)
    advantage, returns = gae(reward, mask, rows, value, 0.9, 0.7, critic_lambda=1.0)
    of_policy, _ = gae(reward, mask, rows, value, 0.9, 0.7)
    _, of_critic = gae(reward, mask, rows, value, 0.9, 1.0)
    torch.testing.assert_close(advantage, of_policy)
    torch.testing.assert_close(returns, of_critic)


def test_lambda_follows_the_length():
    """λ = 1 − 1 / (α·l), l the trained tokens; each sample as if it had this λ alone."""
    reward, value, mask, rows = packed([1, 30, 4, 200], seed=3)
    of_rows = length_adaptive_lambda(mask, rows, 0.05)
    advantage, returns = gae(reward, mask, rows, value, 0.99, 0.9, length_alpha=0.05)
    torch.testing.assert_close(returns, gae(reward, mask, rows, value, 0.99, 0.9).returns)
    for i in range(4):
        own = (rows == i) & mask
        by_hand = max(0.0, 1 - 1 / (0.05 * max(int(own.sum()), 1)))
        assert of_rows[rows == i].tolist() == pytest.approx([by_hand] * int((rows == i).sum()))
        expected = by_definition(reward[own].tolist(), value[own].tolist(), 0.99, by_hand)
        torch.testing.assert_close(advantage[own], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_known_forms():
    """λ = 1: what is still to come minus the value. λ = 0: the error of one step."""
    reward, value, mask = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.2, 0.9]), torch.ones(3).bool()
    rows = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(gae(reward, mask, rows, value, 1.0, 1.0)[0], torch.tensor([0.5, 0.8, 0.1]))
    torch.testing.assert_close(gae(reward, mask, rows, value, 1.0, 0.0)[0], torch.tensor([-0.3, 0.7, 0.1]))


def test_an_empty_pack_has_nothing():
    nothing, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(nothing, nothing.bool(), rows, nothing, 1.0, 0.9)[0].shape == (0,)
