"""SAPO: a smooth gate on the ratio instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def sapo(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """Return ℓ = −(4/τ)·σ(τ·(ρ − 1))·A, where τ = tau_positive if A > 0, else tau_negative.

    SAPO (https://arxiv.org/abs/2511.20347, eq. 5 and 6). At ρ = 1 its gradient equals that of −ρ·A.
    """
    ratio = policy_ratio(log_prob, old, advantage)
    tau = advantage.new_tensor(tau_positive).where(advantage > 0, advantage.new_tensor(tau_negative))
    return PolicyLoss.of(-4 / tau * (tau * (ratio - 1)).sigmoid() * advantage, ratio)


SPEC = PolicyObjective(
    name="sapo",
    formula="−(4/τ)·σ(τ·(ρ − 1))·A, τ = tau_positive where A > 0, else tau_negative",
    paper="SAPO, arXiv 2511.20347",
    loss=sapo,
    parameters={"tau_positive": (PositiveFloat, 1.0), "tau_negative": (PositiveFloat, 1.05)},
)
