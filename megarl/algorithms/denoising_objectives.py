"""Objectives for denoising steps that need the transition's standard deviation or KL, or that need no log-probs.

Each row of a batch is one denoising step of a sample; log_prob, old and advantage are [B]. The token-level objectives
in `megarl.algorithms.objectives` apply to such batches unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.objectives.clip import clip
from megarl.algorithms.objectives.dppo_tv import masked_surrogate
from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.shapes import require_latents, require_one_shape
from megarl.algorithms.transition import element_mean, per_sample

if TYPE_CHECKING:
    import torch

SMALLEST_ERROR = 1e-5
"""Lower bound on the mean absolute error by which DiffusionNFT divides its squared error."""


def grpo_guard(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    std: torch.Tensor,
    divergence: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return PPO's clipped loss, [B], of the ratio ρ = exp(s·(log_prob − old + KL)).

    GRPO-Guard (https://arxiv.org/abs/2510.22319). Under π_old, log_prob − old has mean −KL and a spread that grows with
    1/s. Adding the KL and multiplying by s centers the log-ratios at 0 and makes them comparable across denoising
    steps. The published code also divides the loss by Δ; use `step_weights` with "inverse_interval".

    Args:
        std: [B], the transition's s.
        divergence: [B], `gaussian_kl` of the policy and π_old, differentiable.
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage, std=std, divergence=divergence)
    log_ratio = std.to(log_prob) * (log_prob - old + divergence)
    return clip(log_ratio, log_ratio.new_zeros(log_ratio.shape), advantage, clip_low, clip_high)


def flow_dppo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    divergence: torch.Tensor,
    divergence_limit: float,
    divergence_limit_negative: float | None = None,
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A, [B], as in dppo_tv, with the exact KL of the policy and π_old as the divergence.

    Flow-DPPO (https://arxiv.org/abs/2606.11025).

    Args:
        divergence: [B], `gaussian_kl` of the policy and π_old. No gradient flows through it.
    """
    ratio = policy_ratio(log_prob, old, advantage)
    return masked_surrogate(ratio, advantage, divergence, divergence_limit, divergence_limit_negative)


def diffusion_nft(
    v: torch.Tensor,
    old_v: torch.Tensor,
    x0: torch.Tensor,
    x: torch.Tensor,
    sigma: torch.Tensor,
    advantage: torch.Tensor,
    mixture: float,
    advantage_limit: float,
) -> torch.Tensor:
    """Return ℓ = c/β·(r·E(v⁺) + (1 − r)·E(v⁻)), [B], differentiable in v.

    DiffusionNFT (https://arxiv.org/abs/2509.16117): v⁺ = (1 − β)·v_old + β·v and v⁻ = (1 + β)·v_old − β·v are the
    implicit policies of good and bad samples, r = ½ + ½·clip(A/c, −1, 1) is the probability that the sample is good,
    and E(v) is the squared error of x − σ·v against x0, divided by its mean absolute error. Any sampler may have drawn
    x0.

    Args:
        v: [B, …], velocity at x.
        old_v: [B, …], velocity of the policy that sampled x0.
        x0: [B, …], sampled latents.
        x: [B, …], x0 with fresh noise: `interpolate(x0, noise, sigma)`.
        sigma: [B].
        mixture: β > 0.
        advantage_limit: c > 0.
    """
    require_latents(v=v, old_v=old_v, x0=x0, x=x)
    require_one_shape(sigma=sigma, advantage=advantage)
    good = 0.5 + 0.5 * (advantage / advantage_limit).clamp(-1, 1)

    def error(velocity: torch.Tensor) -> torch.Tensor:
        difference = x - per_sample(sigma, x) * velocity - x0
        return element_mean(difference.square()) / element_mean(difference.detach().abs()).clamp(min=SMALLEST_ERROR)

    better = error((1 - mixture) * old_v + mixture * v)
    worse = error((1 + mixture) * old_v - mixture * v)
    return (advantage_limit / mixture * (good * better + (1 - good) * worse)).to(v.dtype)
