"""Generalised advantages on packed rows against the definition, one sample at a time; the critic's loss by hand."""

import random

import pytest
import torch

from megarl.algorithms.advantages.gae import gae, length_adaptive_lambda
from megarl.algorithms.advantages.returns import at_last_token
from megarl.algorithms.value_loss import squared_error


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
    advantage, returns = gae(reward, value, mask, rows, gamma, gae_lambda)
    for i in range(len(lengths)):
        own = (rows == i) & mask
        expected = torch.tensor(by_definition(reward[own].tolist(), value[own].tolist(), gamma, gae_lambda))
        torch.testing.assert_close(advantage[own], expected)
        torch.testing.assert_close(returns[own], expected + value[own])
    assert not advantage[~mask].any() and not returns[~mask].any()


def test_the_critic_may_have_another_lambda():
    reward, value, mask, rows = packed([7, 4, 3, 9], seed=5)
    advantage, returns = gae(reward, value, mask, rows, 0.9, 0.7, critic_lambda=1.0)
    is_policy_objective, _ = gae(reward, value, mask, rows, 0.9, 0.7)
    _, of_critic = gae(reward, value, mask, rows, 0.9, 1.0)
    torch.testing.assert_close(advantage, is_policy_objective)
    torch.testing.assert_close(returns, of_critic)


def test_lambda_follows_the_length():
    """λ = 1 − 1 / (α·l), l the trained tokens; each sample as if it had this λ alone."""
    reward, value, mask, rows = packed([1, 30, 4, 200], seed=3)
    of_rows = length_adaptive_lambda(mask, rows, 0.05)
    advantage, _ = gae(reward, value, mask, rows, 0.99, of_rows)
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
    torch.testing.assert_close(gae(reward, value, mask, rows, 1.0, 1.0)[0], torch.tensor([0.5, 0.8, 0.1]))
    torch.testing.assert_close(gae(reward, value, mask, rows, 1.0, 0.0)[0], torch.tensor([-0.3, 0.7, 0.1]))


def test_an_empty_pack_has_nothing():
    nothing, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(nothing, nothing, nothing.bool(), rows, 1.0, 0.9)[0].shape == (0,)
    assert at_last_token(nothing, nothing.bool(), rows).shape == (0,)


def test_the_reward_stands_on_the_last_trained_token():
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    mask = torch.tensor([True, True, False, False, False, False, True])
    placed = at_last_token(torch.tensor([3.0, 5.0, 7.0]), mask, rows)
    assert placed.tolist() == [0, 3, 0, 0, 0, 0, 7]


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    # The old value is 0, the return 1.
    [
        (0.1, None, 0.81, -1.8, False),
        (0.5, None, 0.25, -1.0, False),
        (0.1, 0.2, 0.81, -1.8, False),
        (0.5, 0.2, 0.64, 0.0, True),  # has moved 0.5 towards the return: counts as 0.2
        (-0.5, 0.2, 2.25, -3.0, False),  # away from it: not clipped
        (3.0, 0.2, 4.0, 4.0, False),  # beyond it: the plain error is the larger one
    ],
)
def test_value_loss_by_hand(value, clip, loss, slope, clipped):
    now = torch.tensor([value], requires_grad=True)
    out = squared_error(now, torch.zeros(1), torch.ones(1), clip)
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert float(now.grad) == pytest.approx(slope)
    assert bool(out.clipped) is clipped


@pytest.mark.parametrize("clip", [None, 0.4])
def test_gradients_of_the_value_loss(clip):
    old, returns = torch.tensor([0.1, -0.4, 0.9]).double(), torch.tensor([1.0, -1.0, 0.5]).double()
    value = torch.tensor([0.2, 0.8, 0.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: squared_error(x, old, returns, clip).loss, value)


def test_a_length_for_each_row():
    three, rows = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="one shape"):
        gae(three, three, three.bool(), rows, 1.0, torch.ones(1, dtype=torch.float64))
