"""Hand-worked cases and invariances of the advantage."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import advantages
from megarl.algorithms.groups import group_statistics

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def grpo(rewards: list[float], std: str, epsilon: float = 0.0) -> torch.Tensor:
    group = group_statistics(rewards, std)
    n = len(rewards)
    return advantages.grpo(torch.tensor(rewards), torch.full((n,), group.mean), torch.full((n,), group.std), epsilon)


@pytest.mark.parametrize(
    ("std", "expected"),
    # Rewards 1, 0, 0, 1: mean 1/2, squared deviations sum to 1.
    [("sample", math.sqrt(3) / 2), ("population", 1.0), ("none", 0.5)],
)
def test_advantage_by_hand(std, expected):
    torch.testing.assert_close(grpo([1.0, 0.0, 0.0, 1.0], std), expected * torch.tensor([1.0, -1.0, -1.0, 1.0]))


def test_equal_rewards_and_single_samples_have_no_advantage():
    assert grpo([0.7] * 4, "sample", 1e-6).abs().max() < 1e-6
    assert grpo([5.0], "sample", 1e-6).tolist() == [0.0]


@given(REWARDS, st.floats(-5, 5), st.floats(0.5, 4))
def test_advantage_does_not_see_shift_and_scale(rewards, shift, scale):
    if max(rewards) - min(rewards) < 0.1:
        return
    moved = [scale * reward + shift for reward in rewards]
    torch.testing.assert_close(grpo(moved, "sample"), grpo(rewards, "sample"), atol=1e-3, rtol=1e-3)


def test_std_agrees_with_torch():
    rewards = [0.1, 0.9, 0.4, 0.4, -2.0]
    values = torch.tensor(rewards, dtype=torch.float64)
    assert group_statistics(rewards, "sample").std == pytest.approx(float(values.std()))
    assert group_statistics(rewards, "population").std == pytest.approx(float(values.std(correction=0)))


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        advantages.grpo(torch.zeros(3), torch.zeros(1), torch.zeros(3), 0.0)
