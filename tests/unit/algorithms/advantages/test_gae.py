"""GAE on packed rows compared with its definition, one sample at a time."""

import random

import pytest
import torch

from megarl.algorithms.advantages.gae import gae, length_adaptive_lambda
from tests.closeness import TOLERANCE, relative_error


def by_definition(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Compute eq. 16 of arXiv 1506.02438 with explicit sums. The value after the last action is 0."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [
        sum((gamma * gae_lambda) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def packed(lengths: list[int], seed: int):
    """Return random rewards, values, masks and row samples. Masks have holes, and one sample has no trained token."""
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
def test_gae_of_packed_rows_matches_definition(lengths, gamma, gae_lambda):
    reward, value, mask, rows = packed(lengths, seed=len(lengths))
    advantage, returns = gae(reward, mask, rows, value, gamma, gae_lambda)
    for i in range(len(lengths)):
        rows_of_sample = (rows == i) & mask
        expected = torch.tensor(
            by_definition(reward[rows_of_sample].tolist(), value[rows_of_sample].tolist(), gamma, gae_lambda)
        )
        torch.testing.assert_close(advantage[rows_of_sample], expected)
        torch.testing.assert_close(returns[rows_of_sample], expected + value[rows_of_sample])
    assert not advantage[~mask].any() and not returns[~mask].any()


def test_critic_lambda_affects_returns_only():
    reward, value, mask, rows = packed([7, 4, 3, 9], seed=5)
    advantage, returns = gae(reward, mask, rows, value, 0.9, 0.7, critic_lambda=1.0)
    expected_advantage, _ = gae(reward, mask, rows, value, 0.9, 0.7)
    _, expected_returns = gae(reward, mask, rows, value, 0.9, 1.0)
    torch.testing.assert_close(advantage, expected_advantage)
    torch.testing.assert_close(returns, expected_returns)


def test_length_alpha_sets_lambda_per_sample():
    """λ = 1 − 1 / (α·l) with l trained tokens. Each sample matches GAE with that constant λ."""
    reward, value, mask, rows = packed([1, 30, 4, 200], seed=3)
    row_lambda = length_adaptive_lambda(mask, rows, 0.05)
    advantage, returns = gae(reward, mask, rows, value, 0.99, 0.9, length_alpha=0.05)
    torch.testing.assert_close(returns, gae(reward, mask, rows, value, 0.99, 0.9).returns)
    for i in range(4):
        rows_of_sample = (rows == i) & mask
        by_hand = max(0.0, 1 - 1 / (0.05 * max(int(rows_of_sample.sum()), 1)))
        assert row_lambda[rows == i].tolist() == pytest.approx([by_hand] * int((rows == i).sum()))
        expected = by_definition(reward[rows_of_sample].tolist(), value[rows_of_sample].tolist(), 0.99, by_hand)
        assert relative_error(advantage[rows_of_sample], torch.tensor(expected, dtype=torch.float64)) <= TOLERANCE


def test_lambda_of_one_and_zero_reduce_to_known_forms():
    """λ = 1: rewards-to-go minus values. λ = 0: one-step TD errors."""
    reward, value, mask = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.2, 0.9]), torch.ones(3).bool()
    rows = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(gae(reward, mask, rows, value, 1.0, 1.0)[0], torch.tensor([0.5, 0.8, 0.1]))
    torch.testing.assert_close(gae(reward, mask, rows, value, 1.0, 0.0)[0], torch.tensor([-0.3, 0.7, 0.1]))


def test_empty_pack_has_no_advantages():
    empty, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(empty, empty.bool(), rows, empty, 1.0, 0.9)[0].shape == (0,)
