"""The surrogate without tokens that have moved too far in their advantage's direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def masked_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, is_far: torch.Tensor) -> PolicyLoss:
    """ℓ = −M·ρ·A with M = 0 where is_far (bool [N]) and ρ has moved as A asks it to, else 1."""
    require_one_shape(ratio=ratio, advantage=advantage, is_far=is_far)
    high = is_far & (ratio > 1) & (advantage > 0)
    low = is_far & (ratio < 1) & (advantage < 0)
    return PolicyLoss.of((-ratio * advantage).masked_fill(low | high, 0.0), ratio, low, high)
