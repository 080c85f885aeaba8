"""The surrogate with a penalty on the divergence from the old policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, bounded, policy_ratio
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def kl_penalty(log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, penalty: float) -> PolicyLoss:
    """Return ℓ = −ρ·A + penalty·k with k = ρ − 1 − log ρ, whose mean over tokens sampled from π_old is KL(π_old ‖ π).

    TRPO's penalty form (https://arxiv.org/abs/1502.05477, section 4; PPO, https://arxiv.org/abs/1707.06347, eq. 8).
    With a penalty_target, `megarl.algorithms.kl.adapted_penalty` adapts the penalty after each step.
    """
    ratio = policy_ratio(log_prob, old, advantage)
    log_ratio = bounded(log_prob - old)
    return PolicyLoss.of(-ratio * advantage + penalty * (log_ratio.expm1() - log_ratio), ratio)


SPEC = PolicyObjective(
    name="kl_penalty",
    formula="−ρ·A + penalty·(ρ − 1 − log ρ)",
    paper="TRPO's penalty form, arXiv 1502.05477; PPO, arXiv 1707.06347, eq. 8",
    loss=kl_penalty,
    discrete=True,
    parameters={"penalty": (PositiveFloat, 1.0)},
    step_parameters={"penalty_target": (PositiveFloat | None, None)},
)
