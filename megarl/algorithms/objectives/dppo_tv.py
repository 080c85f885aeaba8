"""DPPO with a binary total variation: the surrogate, masked where the policy has moved too far from the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def dppo_tv(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    divergence_limit: float,
    divergence_limit_negative: float | None = None,
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A, where M = 0 for a token that has moved in its advantage's direction and whose |π − π_old|
    exceeds divergence_limit, else 1.

    DPPO-Binary-TV (https://arxiv.org/abs/2602.04879), where π_old is the policy that sampled the token.
    divergence_limit_negative is the limit where A < 0; None uses divergence_limit.
    """
    ratio = policy_ratio(log_prob, old, advantage)
    divergence = (log_prob.detach().exp() - old.exp()).abs()
    return masked_surrogate(ratio, advantage, divergence, divergence_limit, divergence_limit_negative)


def masked_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, divergence: torch.Tensor, limit: float, limit_negative: float | None
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A, where M = 0 if the divergence exceeds its limit and ρ has moved in the advantage's direction,
    else 1. The divergence is float32 [N]. Where A < 0, its limit is limit_negative, if given."""
    require_one_shape(ratio=ratio, advantage=advantage, divergence=divergence)
    high = (divergence > limit) & (ratio > 1) & (advantage > 0)
    low = (divergence > (limit if limit_negative is None else limit_negative)) & (ratio < 1) & (advantage < 0)
    return PolicyLoss.of((-ratio * advantage).masked_fill(low | high, 0.0), ratio, low, high)


SPEC = PolicyObjective(
    name="dppo_tv",
    formula="−ρ·A, 0 for a token that has moved in the direction of A and whose |π − π_old| > divergence_limit",
    paper="DPPO, arXiv 2602.04879",
    loss=dppo_tv,
    discrete=True,
    parameters={"divergence_limit": (PositiveFloat, 0.15), "divergence_limit_negative": (PositiveFloat | None, None)},
)
