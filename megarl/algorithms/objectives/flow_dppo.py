"""Flow-DPPO: a policy-gradient surrogate that masks denoising steps whose exact KL to the old policy is too large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.objectives.dppo_tv import masked_surrogate
from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def flow_dppo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    divergence: torch.Tensor,
    divergence_limit: float,
    divergence_limit_negative: float | None = None,
) -> PolicyLoss:
    """Return ℓ = −M·ρ·A, [N], as in dppo_tv, with the exact KL between π_old and the policy as the divergence.

    Flow-DPPO (https://arxiv.org/abs/2606.11025).

    Args:
        divergence: [N], `gaussian_kl` of the policy and π_old. No gradient flows through it.
    """
    ratio = policy_ratio(log_prob, old, advantage)
    return masked_surrogate(ratio, advantage, divergence, divergence_limit, divergence_limit_negative)


SPEC = PolicyObjective(
    name="flow_dppo",
    formula="−ρ·A, 0 for a step that has moved in the direction of A and whose KL(π_old ‖ π) > divergence_limit",
    paper="Flow-DPPO, arXiv 2606.11025",
    loss=flow_dppo,
    inputs=("divergence",),
    parameters={"divergence_limit": (PositiveFloat, 1e-5), "divergence_limit_negative": (PositiveFloat | None, None)},
)
