"""DPPO with a binary KL: the surrogate, masked where the policy has diverged too far from the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.objectives.dppo_tv import masked_surrogate
from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

SMALLEST = 1e-8
"""Lower bound on 1 − p and 1 − q that keeps the logarithm in the binary divergence finite."""


def dppo_kl(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    divergence_limit: float,
    divergence_limit_negative: float | None = None,
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A as in dppo_tv, with the binary divergence KL(π_old ‖ π) of two outcomes, this token or any
    other: p·log(p/q) + (1 − p)·log((1 − p)/(1 − q)), with p under π_old and q under π.

    DPPO-Binary-KL (https://arxiv.org/abs/2602.04879).
    """
    ratio = policy_ratio(log_prob, old, advantage)
    now = log_prob.detach()
    others_now, others_old = ((-x.expm1()).clamp(min=SMALLEST) for x in (now, old))
    divergence = old.exp() * (old - now) + others_old * (others_old / others_now).log()
    return masked_surrogate(ratio, advantage, divergence, divergence_limit, divergence_limit_negative)


SPEC = PolicyObjective(
    name="dppo_kl",
    formula="−ρ·A, 0 for a token that has moved in the direction of A and whose KL(π_old ‖ π) > divergence_limit",
    paper="DPPO, arXiv 2602.04879",
    loss=dppo_kl,
    discrete=True,
    parameters={"divergence_limit": (PositiveFloat, 0.05), "divergence_limit_negative": (PositiveFloat | None, None)},
)
