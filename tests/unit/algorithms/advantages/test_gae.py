"""GAE on packed rows compared with its definition, one sample at a time."""

import random

import pytest
import torch
import torch.nn.functional as F

from megarl.algorithms.advantages.gae import gae, length_adaptive_lambda
from tests.closeness import TOLERANCES, assert_close, relative_error


def by_definition(reward: torch.Tensor, value: torch.Tensor, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Compute eq. 16 of arXiv 1506.02438 with explicit sums in the dtype of the rewards. The value after the last
    action is 0."""
    deltas = reward + gamma * F.pad(value, (0, 1))[1:] - value
    distances = torch.arange(len(deltas)) - torch.arange(len(deltas))[:, None]
    return (reward.new_tensor(gamma * gae_lambda) ** distances.clamp(min=0)).triu() @ deltas


def assert_defined(advantage: torch.Tensor, reward: torch.Tensor, value: torch.Tensor, *factors: float) -> None:
    """Compare the advantages of one sample with the definition. `factors`: γ and λ."""
    exact, plain = (
        {"advantage": by_definition(r, v, *factors)} for r, v in ((reward.double(), value.double()), (reward, value))
    )
    assert_close({"advantage": advantage}, exact, plain, f"{factors}")


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
        own = advantage[rows_of_sample]
        assert_defined(own, reward[rows_of_sample], value[rows_of_sample], gamma, gae_lambda)
        assert torch.equal(returns[rows_of_sample], own + value[rows_of_sample])
    assert not advantage[~mask].any() and not returns[~mask].any()


def test_critic_lambda_affects_returns_only():
    reward, value, mask, rows = packed([7, 4, 3, 9], seed=5)
    advantage, returns = gae(reward, mask, rows, value, 0.9, 0.7, critic_lambda=1.0)
    expected_advantage, _ = gae(reward, mask, rows, value, 0.9, 0.7)
    _, expected_returns = gae(reward, mask, rows, value, 0.9, 1.0)
    assert torch.equal(advantage, expected_advantage) and torch.equal(returns, expected_returns)


def test_length_alpha_sets_lambda_per_sample():
    """λ = 1 − 1 / (α·l) with l trained tokens. Each sample matches GAE with that constant λ."""
    reward, value, mask, rows = packed([1, 30, 4, 200], seed=3)
    row_lambda = length_adaptive_lambda(mask, rows, 0.05)
    advantage, returns = gae(reward, mask, rows, value, 0.99, 0.9, length_alpha=0.05)
    assert torch.equal(returns, gae(reward, mask, rows, value, 0.99, 0.9).returns)
    for i in range(4):
        rows_of_sample = (rows == i) & mask
        by_hand = max(0.0, 1 - 1 / (0.05 * max(int(rows_of_sample.sum()), 1)))
        assert row_lambda[rows == i].tolist() == pytest.approx([by_hand] * int((rows == i).sum()))
        assert_defined(advantage[rows_of_sample], reward[rows_of_sample], value[rows_of_sample], 0.99, by_hand)


def test_lambda_of_one_and_zero_reduce_to_known_forms():
    """λ = 1: rewards-to-go minus values. λ = 0: one-step TD errors."""
    reward, value = torch.tensor([[0.0, 0, 1], [0.5, 0.2, 0.9]], dtype=torch.float64)
    mask, rows = torch.ones(3).bool(), torch.zeros(3, dtype=torch.int64)
    for gae_lambda, expected in ((1.0, [0.5, 0.8, 0.1]), (0.0, [-0.3, 0.7, 0.1])):
        actual = gae(reward, mask, rows, value, 1.0, gae_lambda).advantage
        assert relative_error(actual, reward.new_tensor(expected)) <= TOLERANCES[torch.float64]


def test_empty_pack_has_no_advantages():
    empty, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(empty, empty.bool(), rows, empty, 1.0, 0.9)[0].shape == (0,)
