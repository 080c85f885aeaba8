"""Hand-worked cases and invariances of the advantage, the objective, the KL estimators and the aggregation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import advantages, kl, policy_loss
from megarl.algorithms.aggregation import sample_weights
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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "low", "high", "slope"),
    [
        (1.0, 2.0, -2.0, False, False, -2.0),
        (1.5, 2.0, -2.4, False, True, 0.0),  # clipped to 1.2
        (0.5, 2.0, -1.0, False, False, -1.0),  # moving back is never clipped
        (0.5, -2.0, 1.6, True, False, 0.0),  # clipped to 0.8
        (1.5, -2.0, 3.0, False, False, 3.0),
    ],
)
def test_clip_by_hand(ratio, advantage, loss, low, high, slope):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    out = policy_loss.clip(log_prob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert (bool(out.clipped_low), bool(out.clipped_high)) == (low, high)
    assert float(log_prob.grad) == pytest.approx(slope)


def test_clip_higher_moves_only_the_upper_bound():
    out = policy_loss.clip(torch.tensor([1.25]).log(), torch.zeros(1), torch.ones(1), 0.2, 0.28)
    assert float(out.loss.detach()) == pytest.approx(-1.25)


def test_kl_estimators_agree_with_the_exact_divergence():
    torch.manual_seed(0)
    policy, reference = (torch.randn(50, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        expected = (policy.exp() * kl.kl_estimate(name, policy, reference)).sum()
        torch.testing.assert_close(expected, exact)
    assert (kl.kl_estimate("k3", policy, reference) >= 0).all()


def test_gradient_of_k2_is_that_of_the_divergence():
    torch.manual_seed(0)
    reference = torch.randn(20, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    sampled = (policy.exp().detach() * kl.kl_estimate("k2", policy, reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], exact)


def test_aggregation_by_hand():
    assert sample_weights("sequence_mean_of_token_means", [4, 1, 0]) == pytest.approx([1 / 12, 1 / 3, 0])
    assert sample_weights("sequence_mean_of_token_sums", [4, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 0])
    assert sample_weights("token_mean", [4, 1, 0]) == pytest.approx([1 / 5, 1 / 5, 0])


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        advantages.grpo(torch.zeros(3), torch.zeros(1), torch.zeros(3), 0.0)
    with pytest.raises(ValueError, match="one shape"):
        policy_loss.clip(torch.zeros(3), torch.zeros(1), torch.zeros(3), 0.2, 0.2)
    with pytest.raises(ValueError, match="differ in shape"):
        kl.kl_estimate("k1", torch.zeros(3), torch.zeros(1))
