"""The result type shared by all policy objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.ratio import ratio_of
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


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
