"""Bi-Level GAE: a recursion over turns and tokens, and special cases that reduce to GAE."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.advantages.bi_level_gae import bi_level_gae
from megarl.algorithms.advantages.gae import gae

GENERATOR = torch.Generator().manual_seed(0)
MASKS = ["1101110", "1", "000", "0101", "11111"]
MASK = torch.tensor([flag == "1" for mask in MASKS for flag in mask])
ROW_SAMPLE = torch.tensor([i for i, mask in enumerate(MASKS) for _ in mask])
REWARD, VALUE = torch.randn(2, len(MASK), generator=GENERATOR, dtype=torch.float64)


def turns(mask: str) -> list[list[int]]:
    """Return the token indices of each run of trained tokens."""
    found: list[list[int]] = []
    for t, flag in enumerate(mask):
        if flag == "1" and t and mask[t - 1] == "1":
            found[-1].append(t)
        elif flag == "1":
            found.append([t])
    return found


def recursion(gamma: float, gae_lambda: float, turn_gamma: float, turn_lambda: float) -> torch.Tensor:
    """Return the advantages, computed backwards over turns, then backwards over the tokens of each turn."""
    advantage, start = torch.zeros_like(REWARD), 0
    for mask in MASKS:
        next_value = of_next = 0.0
        for turn in reversed(turns(mask)):
            end = start + turn[-1]
            delta = REWARD[end] + turn_gamma * next_value - VALUE[end]
            advantage[end] = of_next = delta + turn_gamma * turn_lambda * of_next
            next_value = VALUE[end]
            for t in reversed(turn[:-1]):
                delta = REWARD[start + t] + gamma * VALUE[start + t + 1] - VALUE[start + t]
                advantage[start + t] = delta + gamma * gae_lambda * advantage[start + t + 1]
        start += len(mask)
    return advantage


@pytest.mark.parametrize("turn_lambda", [0.3, None])
def test_advantages_match_the_recursion(turn_lambda):
    actual, returns = bi_level_gae(REWARD, MASK, ROW_SAMPLE, VALUE, 0.9, 0.8, 0.7, turn_lambda)
    expected = recursion(0.9, 0.8, 0.7, 0.8 if turn_lambda is None else turn_lambda)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(returns, torch.where(MASK, expected + VALUE, 0.0))


def test_samples_of_one_turn_reduce_to_gae():
    """With one turn, the turn's advantage is the last token's temporal difference."""
    mask = torch.tensor([True] * 4 + [False] * 2 + [True] * 3)
    row_sample = torch.tensor([0] * 6 + [1] * 3)
    reward, value = REWARD[:9], VALUE[:9]
    actual = bi_level_gae(reward, mask, row_sample, value, 0.9, 0.8, 0.5)
    for mine, plain in zip(actual, gae(reward, mask, row_sample, value, 0.9, 0.8), strict=True):
        torch.testing.assert_close(mine, plain)


def test_turns_of_one_token_reduce_to_gae_over_turns():
    mask = torch.tensor([True, False, True, False, False, True])
    row_sample = torch.zeros(6, dtype=torch.long)
    actual = bi_level_gae(REWARD[:6], mask, row_sample, VALUE[:6], 0.1, 0.2, 0.9, 0.8)
    for mine, plain in zip(actual, gae(REWARD[:6], mask, row_sample, VALUE[:6], 0.9, 0.8), strict=True):
        torch.testing.assert_close(mine, plain)


def test_discount_depends_on_turns_and_not_on_their_length():
    """The reward of the second turn reaches the first one with a factor of 0.5, whatever the turns' lengths."""
    for first, second in ((1, 1), (3, 2), (2, 7)):
        mask = torch.tensor([True] * first + [False] + [True] * second)
        reward = torch.zeros(len(mask))
        reward[-1] = 8.0
        zeros = torch.zeros(len(mask))
        advantage, _ = bi_level_gae(reward, mask, torch.zeros(len(mask)).long(), zeros, 1.0, 1.0, 0.5)
        assert advantage.tolist() == [4.0] * first + [0.0] + [8.0] * second


def test_empty_batch_has_no_advantages():
    empty = torch.zeros(0)
    advantage, returns = bi_level_gae(empty, empty.bool(), empty.long(), empty, 1.0, 1.0, 0.95)
    assert len(advantage) == len(returns) == 0
