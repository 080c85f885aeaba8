"""Policy objectives: from log-probs and advantages to a loss per token."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """Per token, float32 or bool [N]: the loss, the ratio π/π_old, and where the clip cut the gradient off."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def clip(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """ℓ = −min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A) with ρ = exp(log_prob − old).

    PPO (https://arxiv.org/abs/1707.06347, eq. 7); DAPO's clip-higher has clip_high > clip_low.

    log_prob, old, advantage   float32 [N]; gradients flow into log_prob only
    """
    if not log_prob.shape == old.shape == advantage.shape:
        raise ValueError(
            f"log_prob, old and advantage must share one shape [N], got {tuple(log_prob.shape)}, "
            f"{tuple(old.shape)}, {tuple(advantage.shape)}"
        )
    ratio = (log_prob - old).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
    with torch.no_grad():
        clipped_low = (ratio < 1 - clip_low) & (advantage < 0)
        clipped_high = (ratio > 1 + clip_high) & (advantage > 0)
    return PolicyLoss(loss, ratio.detach(), clipped_low, clipped_high)
