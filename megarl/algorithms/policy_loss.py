"""Policy objectives, token by token: from log-probs and advantages to a loss per token.

In all of them log_prob, old and advantage are float32 [N], gradients flow into log_prob only, and the ratio is
ρ = π/π_old = exp(log_prob − old), bounded as ratio.py says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.algorithms.ratio import bounded, ratio_of
from megarl.algorithms.shapes import require_one_shape

SMALLEST = 1e-8
"""Least probability of the other tokens together, whose logarithm the binary divergence takes."""


class PolicyLoss(NamedTuple):
    """Per token, float32 or bool [N]: the loss, the ratio, and where a bound cut off the gradient (CISPO: the ratio),
    from below and from above."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor

    @classmethod
    def of(
        cls,
        loss: torch.Tensor,
        ratio: torch.Tensor,
        low: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
    ) -> PolicyLoss:
        nowhere = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, ratio.detach(), nowhere if low is None else low, nowhere if high is None else high)


def clip(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """ℓ = −min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A).

    PPO (https://arxiv.org/abs/1707.06347, eq. 7); DAPO's clip-higher (https://arxiv.org/abs/2503.14476) has
    clip_high > clip_low. With dual_clip c > 1, where A < 0: ℓ ≤ −c·A (https://arxiv.org/abs/1912.09729, eq. 5).
    """
    ratio = _ratio(log_prob, old, advantage)
    return clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """The loss of `clip` for ratios of whatever tokens or samples, float32 [N]."""
    require_one_shape(ratio=ratio, advantage=advantage)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    if dual_clip is not None:
        worse = (ratio > dual_clip) & (advantage < 0)
        loss, high = torch.where(worse, -dual_clip * advantage, loss), high | worse
    return PolicyLoss.of(loss, ratio, low, high)


def unclipped(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """ℓ = −ρ·A: the surrogate that TRPO bounds (https://arxiv.org/abs/1502.05477, eq. 14), without a bound."""
    ratio = _ratio(log_prob, old, advantage)
    return PolicyLoss.of(-ratio * advantage, ratio)


def kl_penalty(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, penalty: float) -> PolicyLoss:
    """ℓ = −ρ·A + penalty · k with k = ρ − 1 − log ρ, whose mean over tokens of π_old is KL(π_old ‖ π).

    TRPO's penalty form (https://arxiv.org/abs/1502.05477, section 4; PPO, https://arxiv.org/abs/1707.06347, eq. 8).
    """
    ratio = _ratio(log_prob, old, advantage)
    log_ratio = bounded(log_prob - old)
    return PolicyLoss.of(-ratio * advantage + penalty * (torch.expm1(log_ratio) - log_ratio), ratio)


def cispo(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip_low: float | None, clip_high: float
) -> PolicyLoss:
    """ℓ = −sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π: no token loses its gradient.

    CISPO (https://arxiv.org/abs/2506.13585, eq. 4 and 5), which has no lower bound (clip_low None), tunes clip_high and
    does not say to what. The value of ScaleRL (https://arxiv.org/abs/2510.13786), which names the bound itself, is
    1 + clip_high = 5.
    """
    ratio = _ratio(log_prob, old, advantage).detach()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(lowest, 1 + clip_high)
    return PolicyLoss.of(-weight * advantage * log_prob, ratio, ratio < lowest, ratio > 1 + clip_high)


def sapo(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """ℓ = −(4/τ)·σ(τ·(ρ − 1))·A, with τ = tau_positive where A > 0, else tau_negative: a gate instead of a clip.

    SAPO (https://arxiv.org/abs/2511.20347, eq. 5 and 6). At ρ = 1 its gradient is that of −ρ·A.
    """
    ratio = _ratio(log_prob, old, advantage)
    tau = torch.where(advantage > 0, advantage.new_tensor(tau_positive), advantage.new_tensor(tau_negative))
    return PolicyLoss.of(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage, ratio)


def dppo_tv(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, divergence_limit: float) -> PolicyLoss:
    """ℓ = −M·ρ·A, where M = 0 for a token that has moved in its advantage's direction and whose |π − π_old| is above
    divergence_limit.

    DPPO-Binary-TV (https://arxiv.org/abs/2602.04879), whose π_old is the policy that sampled.
    """
    ratio = _ratio(log_prob, old, advantage)
    divergence = (log_prob.detach().exp() - old.exp()).abs()
    return _masked_surrogate(ratio, advantage, divergence > divergence_limit)


def dppo_kl(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, divergence_limit: float) -> PolicyLoss:
    """As dppo_tv, with the divergence KL(π_old ‖ π) between this token and all others together:
    p·log(p/q) + (1 − p)·log((1 − p)/(1 − q)), p of π_old and q of π.

    DPPO-Binary-KL (https://arxiv.org/abs/2602.04879).
    """
    ratio = _ratio(log_prob, old, advantage)
    now = log_prob.detach()
    others_now, others_old = ((-torch.expm1(x)).clamp(min=SMALLEST) for x in (now, old))
    divergence = old.exp() * (old - now) + others_old * (others_old / others_now).log()
    return _masked_surrogate(ratio, advantage, divergence > divergence_limit)


def _masked_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, far: torch.Tensor) -> PolicyLoss:
    high = far & (ratio > 1) & (advantage > 0)
    low = far & (ratio < 1) & (advantage < 0)
    return PolicyLoss.of(torch.where(low | high, 0.0, -ratio * advantage), ratio, low, high)


def _ratio(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    return ratio_of(log_prob - old)
