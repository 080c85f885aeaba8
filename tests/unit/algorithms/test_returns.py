"""Rewards-to-go on packed rows, compared with explicit sums."""

import random

import pytest
import torch

from megarl.algorithms.returns import at_last_token, reward_to_go, sum_of_sample
from tests.closeness import assert_matches

ROWS = torch.tensor([0, 0, 0, 0, 1, 2, 2])
MASK = torch.tensor([True, False, True, True, False, True, True])


def test_reward_to_go_counts_trained_tokens_only():
    reward = torch.tensor([1.0, 50.0, 2.0, 4.0, 70.0, 8.0, 16.0])
    expected = [1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 4, 0, 8 + 0.5 * 16, 16]
    assert reward_to_go(reward, MASK, ROWS, 0.5).tolist() == expected
    assert sum_of_sample(reward, MASK, ROWS, 4).tolist() == [7.0, 0.0, 24.0, 0.0]


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_reward_to_go_stays_within_the_sample(gamma):
    source = random.Random(2)
    rows = sorted(source.randrange(6) for _ in range(60))
    mask = [source.random() < 0.7 for _ in rows]
    reward = torch.tensor([source.gauss(0, 1) for _ in rows])
    actual = reward_to_go(reward, torch.tensor(mask), torch.tensor(rows), gamma)

    def explicit() -> dict[str, torch.Tensor]:
        own = reward.to(torch.get_default_dtype())
        sums = torch.zeros_like(own)
        for t in range(60):
            later = [s for s in range(t, 60) if rows[s] == rows[t] and mask[s]] if mask[t] else []
            for distance, s in enumerate(later):
                sums[t] += gamma**distance * own[s]
        return {"sums": sums}

    assert_matches({"sums": actual}, explicit, "rewards-to-go")


def test_sample_reward_is_placed_on_last_trained_token():
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    mask = torch.tensor([True, True, False, False, False, False, True])
    placed = at_last_token(torch.tensor([3.0, 5.0, 7.0]), mask, rows)
    assert placed.tolist() == [0, 3, 0, 0, 0, 0, 7]


def test_empty_pack_has_no_rewards():
    empty, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert at_last_token(empty, empty.bool(), rows).shape == (0,)
    assert reward_to_go(empty, empty.bool(), rows, 0.9).shape == (0,)
