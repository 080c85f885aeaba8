"""Objectives on denoising steps: worked examples and properties."""

import math

import pytest
import torch

from megarl.algorithms import transition as policy
from megarl.algorithms.objectives.diffusion_nft import diffusion_nft
from megarl.algorithms.objectives.flow_dppo import flow_dppo
from megarl.algorithms.objectives.grpo_guard import grpo_guard
from megarl.algorithms.objectives.unclipped import unclipped
from megarl.algorithms.transition import transition

SIGMA = torch.tensor([0.9, 0.6, 0.3, 0.1], dtype=torch.float64)
STEP = transition("flow", 0.7, SIGMA, SIGMA / 2, SIGMA)
ADVANTAGE = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
X, V, OLD_V, NOISE = torch.randn(4, 4, 3, 2, dtype=torch.float64, generator=GENERATOR)
GUARD, NFT = dict(clip_low=1e-3, clip_high=1e-3), dict(mixture=0.1, advantage_limit=5.0)


def guard_ratio(x_next: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    log_prob, old = policy.log_prob(STEP, X, v, x_next), policy.log_prob(STEP, X, OLD_V, x_next)
    divergence = policy.gaussian_kl(STEP, v, OLD_V)
    return grpo_guard(log_prob, old, ADVANTAGE, STEP.std, divergence, **GUARD).ratio


def test_guard_ratio_of_the_old_mean_is_one():
    """The log-prob of x' = μ_old differs by exactly −KL, which GRPO-Guard adds back."""
    torch.testing.assert_close(guard_ratio(policy.mean(STEP, X, OLD_V), V), torch.ones_like(ADVANTAGE))


def test_guard_log_ratio_is_linear_in_the_noise():
    """For x' = μ_old + s·ε it is mean(ε·(μ − μ_old)), without the 1/s of the plain log-ratio."""
    near = OLD_V + 1e-2 * (V - OLD_V)
    shift = (policy.mean(STEP, X, near) - policy.mean(STEP, X, OLD_V)).flatten(1)
    ratio = guard_ratio(policy.sample(STEP, X, OLD_V, NOISE), near)
    torch.testing.assert_close(ratio.log(), (NOISE.flatten(1) * shift).mean(1))


def test_guard_clips_the_normalized_ratio():
    log_prob, old = torch.tensor([0.02, 0.001, -0.02]), torch.zeros(3)
    advantage, std, divergence = torch.ones(3), torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0.0, 0.0, 0.03])
    result = grpo_guard(log_prob, old, advantage, std, divergence, **GUARD)
    assert result.loss.tolist() == pytest.approx([-1.001, -math.exp(1e-4), -math.exp(1e-3)])
    assert result.clipped_high.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "divergence", "masked"),
    [
        (0.1, 1.0, 2e-4, True),
        (0.1, 1.0, 0.5e-4, False),
        (-0.1, 1.0, 2e-4, False),  # moving back to the old policy is never masked
        (-0.1, -1.0, 2e-4, True),
        (0.1, -1.0, 2e-4, False),
    ],
)
def test_flow_dppo_masks_far_steps_that_move_further(log_ratio, advantage, divergence, masked):
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    arguments = log_prob, torch.zeros(1), torch.tensor([advantage])
    loss = flow_dppo(*arguments, torch.tensor([divergence], requires_grad=True), divergence_limit=1e-4).loss
    expected = 0.0 if masked else -math.exp(log_ratio) * advantage
    assert loss.tolist() == pytest.approx([expected])
    assert torch.autograd.grad(loss.sum(), log_prob)[0].tolist() == pytest.approx([expected])


def test_flow_dppo_gradient_ignores_the_divergence():
    def gradient(masks: bool) -> torch.Tensor:
        v = V.clone().requires_grad_()
        log_prob, old = policy.log_prob(STEP, X, v, X), policy.log_prob(STEP, X, OLD_V, X)
        if masks:
            loss = flow_dppo(log_prob, old, ADVANTAGE, policy.gaussian_kl(STEP, v, OLD_V), divergence_limit=math.inf)
        else:
            loss = unclipped(log_prob, old, ADVANTAGE)
        return torch.autograd.grad(loss.loss.sum(), v)[0]

    assert torch.equal(gradient(True), gradient(False))


def nft(v: torch.Tensor, advantage: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    x = policy.interpolate(X[rows], NOISE[rows], SIGMA[rows])
    return diffusion_nft(v, OLD_V[rows], X[rows], x, SIGMA[rows], advantage, **NFT)


def test_nft_gradient_at_old_policy_is_proportional_to_advantage():
    """At v = v_old both errors are equal and their gradients opposite, so the sum is c·(2r − 1) = A times one."""
    v = OLD_V.clone().requires_grad_()
    [gradient] = torch.autograd.grad(nft(v, ADVANTAGE).sum(), v)
    sigma, error = SIGMA.view(4, 1, 1), OLD_V - (NOISE - X)
    scale = (sigma * error).abs().mean((1, 2), keepdim=True)
    expected = ADVANTAGE.view(4, 1, 1) * 2 * sigma**2 * error / scale / error[0].numel()
    torch.testing.assert_close(gradient, expected)


def test_nft_limits_the_advantage():
    far, limit = nft(V, torch.full((4,), 100.0)), nft(V, torch.full((4,), 5.0))
    assert torch.equal(far, limit) and not torch.equal(far, nft(V, torch.full((4,), 4.9)))


def test_nft_is_finite_for_an_exact_velocity():
    """With values of ±1 and a mixture of ½, all operations are exact."""
    noise, black, options = NOISE.sign(), torch.zeros_like(X), dict(mixture=0.5, advantage_limit=5.0)
    v = noise.clone().requires_grad_()
    loss = diffusion_nft(v, noise, black, policy.interpolate(black, noise, SIGMA), SIGMA, ADVANTAGE, **options)
    [gradient] = torch.autograd.grad(loss.sum(), v)
    assert not loss.any() and not gradient.any()


@pytest.mark.parametrize("row", range(4))
def test_nft_loss_does_not_depend_on_the_batch(row):
    rows = slice(row, row + 1)
    torch.testing.assert_close(nft(V, ADVANTAGE)[rows], nft(V[rows], ADVANTAGE[rows], rows), rtol=1e-14, atol=0)


def test_losses_reject_columns():
    """A loss [B] times a column [B, 1] would broadcast to [B, B]."""
    column = ADVANTAGE[:, None]
    with pytest.raises(ValueError, match="same shape"):
        grpo_guard(ADVANTAGE, ADVANTAGE, ADVANTAGE, column, ADVANTAGE, **GUARD)
    with pytest.raises(ValueError, match="same shape"):
        flow_dppo(ADVANTAGE, ADVANTAGE, ADVANTAGE, column, divergence_limit=1e-4)
    with pytest.raises(ValueError, match="same shape"):
        nft(V, column)
