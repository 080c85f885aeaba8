import math

import pytest
import torch

from megarl.algorithms.rewards import binary_cross_entropy, token_reward


def test_token_rewards_are_scaled_log_ratios():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    rewards = token_reward(log_prob, torch.tensor([-1.5, -1.0]), 0.05)
    torch.testing.assert_close(rewards.detach(), torch.tensor([0.025, -0.05]))
    rewards.sum().backward()
    assert log_prob.grad.tolist() == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("reward", [-40.0, -1.3, 0.0, 2.0, 40.0])
@pytest.mark.parametrize("success", [0.0, 1.0])
def test_cross_entropy_is_the_outcome_log_probability(reward, success):
    probability = 1 / (1 + math.exp(-reward)) if success else 1 / (1 + math.exp(reward))
    loss = binary_cross_entropy(torch.tensor([reward], dtype=torch.float64), torch.tensor([success]).double())
    assert float(loss) == pytest.approx(-math.log(probability), rel=1e-9, abs=1e-12)
