"""KL rewards compared with worked examples and closed forms."""

import math

import pytest
import torch

from megarl.algorithms.kl import kl_reward

OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0])
REFERENCE = torch.tensor([-1.5, -1.0, -0.5, 4.0])
MASK = torch.tensor([True, True, True, False])  # log-ratios 1/2, −1, 0, and an ignored one


def test_token_level_rewards_each_trained_token():
    torch.testing.assert_close(kl_reward(OLD, REFERENCE, MASK, 2.0, "k1", "token"), torch.tensor([-1.0, 2.0, 0.0, 0.0]))
    torch.testing.assert_close(kl_reward(OLD, REFERENCE, MASK, 2.0, "k2", "token"), torch.tensor([-0.25, -1.0, 0, 0]))


def test_sequence_level_rewards_the_last_trained_token():
    total = 0.5 - 1.0
    expected = torch.tensor([0.0, 0.0, -2.0 * (math.exp(-total) - 1 + total), 0.0])
    torch.testing.assert_close(kl_reward(OLD, REFERENCE, MASK, 2.0, "k3", "sequence"), expected)


def test_limit_applies_before_the_coefficient():
    reward = kl_reward(OLD, REFERENCE, MASK, 2.0, "k3", "token", limit=0.2)
    torch.testing.assert_close(reward, torch.tensor([-2 * (math.exp(-0.5) - 1 + 0.5), -0.4, 0.0, 0.0]))
    whole = kl_reward(OLD, REFERENCE, MASK, 2.0, "k1", "sequence", limit=0.2)
    torch.testing.assert_close(whole, torch.tensor([0.0, 0.0, 0.4, 0.0]))


FORMS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d, "abs": abs}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", FORMS)
def test_every_estimator_and_level(estimator, level):
    k = FORMS[estimator]
    estimates = [k(0.5), k(-1.0), k(0.0), 0.0] if level == "token" else [0.0, 0.0, k(-0.5), 0.0]
    expected = torch.tensor([-0.3 * x for x in estimates])
    torch.testing.assert_close(kl_reward(OLD, REFERENCE, MASK, 0.3, estimator, level), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_trained_tokens_have_no_reward(level):
    assert not kl_reward(OLD, REFERENCE, torch.zeros(4).bool(), 2.0, "k1", level).any()
    assert kl_reward(*torch.zeros(2, 0), torch.zeros(0).bool(), 2.0, "k1", level).shape == (0,)
