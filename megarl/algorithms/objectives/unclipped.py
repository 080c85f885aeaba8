"""The unclipped policy surrogate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import PolicyObjective

if TYPE_CHECKING:
    import torch


def unclipped(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """Return ℓ = −ρ·A: TRPO's surrogate (https://arxiv.org/abs/1502.05477, eq. 14) without its constraint."""
    ratio = policy_ratio(log_prob, old, advantage)
    return PolicyLoss.of(-ratio * advantage, ratio)


SPEC = PolicyObjective(
    name="unclipped",
    formula="−ρ·A",
    paper="the surrogate of TRPO, arXiv 1502.05477, unbounded unless algorithm.trust_region.kl_limit is set",
    loss=unclipped,
)
