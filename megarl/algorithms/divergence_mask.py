"""The surrogate without tokens that have moved too far in their advantage's direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def masked_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, divergence: torch.Tensor, limit: float, limit_negative: float | None
) -> PolicyLoss:
    """ℓ = −M·ρ·A with M = 0 where the divergence is above its limit and ρ has moved as A asks it to, else 1.

    divergence       float32 [N]
    limit_negative   the limit where A < 0 (None: the same)
    """
    require_one_shape(ratio=ratio, advantage=advantage, divergence=divergence)
    high = (divergence > limit) & (ratio > 1) & (advantage > 0)
    low = (divergence > (limit if limit_negative is None else limit_negative)) & (ratio < 1) & (advantage < 0)
    return PolicyLoss.of((-ratio * advantage).masked_fill(low | high, 0.0), ratio, low, high)
