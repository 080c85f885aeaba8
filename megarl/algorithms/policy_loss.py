"""Probability ratios from log-prob differences, and the result type shared by all policy objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch

LARGEST_LOG_RATIO = 20.0
"""Upper bound on log-ratios. A token with a larger ratio would dominate the update. Beyond 88, exp overflows float32,
and a single infinity turns all gradients into NaN (0 · ∞), even for tokens whose clipped loss has no gradient."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to at most LARGEST_LOG_RATIO. Clamped values receive no gradient; all others are unchanged."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the bounded log-ratio, so that value and gradient are finite."""
    return bounded(log_ratio).exp()


class PolicyLoss(NamedTuple):
    """Per-token loss and ratio, float32 [N], and masks, bool [N], of the tokens whose gradient a lower or upper bound
    removed (for CISPO: whose ratio was clamped)."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor

    @classmethod
    def of(
        cls, loss: torch.Tensor, ratio: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
    ) -> PolicyLoss:
        none_clipped = loss.new_zeros(loss.shape).bool()
        return cls(loss, ratio.detach(), none_clipped if low is None else low, none_clipped if high is None else high)


def policy_ratio(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return the ratio ρ of each token, float32 [N], differentiable in log_prob."""
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    return ratio_of(log_prob - old)
