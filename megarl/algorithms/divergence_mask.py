"""Policy surrogate that masks tokens which have moved too far in the direction of their advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def masked_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, divergence: torch.Tensor, limit: float, limit_negative: float | None
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A, where M = 0 if the divergence exceeds its limit and ρ has moved in the advantage's direction,
    else 1.

    Args:
        divergence: float32 [N].
        limit: the limit for A > 0.
        limit_negative: the limit for A < 0; None uses `limit`.
    """
    require_one_shape(ratio=ratio, advantage=advantage, divergence=divergence)
    high = (divergence > limit) & (ratio > 1) & (advantage > 0)
    low = (divergence > (limit if limit_negative is None else limit_negative)) & (ratio < 1) & (advantage < 0)
    return PolicyLoss.of((-ratio * advantage).masked_fill(low | high, 0.0), ratio, low, high)
