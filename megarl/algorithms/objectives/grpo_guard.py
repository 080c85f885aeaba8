"""GRPO-Guard: PPO's clipped loss with a normalized ratio for denoising steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.objectives.clip import clip
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import ClipLow, PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def grpo_guard(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    std: torch.Tensor,
    divergence: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return PPO's clipped loss, [N], of the ratio ρ = exp(s·(log_prob − old + KL)).

    GRPO-Guard (https://arxiv.org/abs/2510.22319). Under π_old, log_prob − old has mean −KL and a spread that grows with
    1/s. Adding the KL and multiplying by s centers the log-ratios at 0 and makes them comparable across denoising
    steps. The published code also divides the loss by Δ; use `step_weights` with "inverse_interval".

    Args:
        std: [N], the transition's s.
        divergence: [N], `gaussian_kl` of the policy and π_old, differentiable.
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage, std=std, divergence=divergence)
    log_ratio = std.to(log_prob) * (log_prob - old + divergence)
    return clip(log_ratio, log_ratio.new_zeros(log_ratio.shape), advantage, clip_low, clip_high)


SPEC = PolicyObjective(
    name="grpo_guard",
    formula="as clip, with ρ = exp(s·(log π − log π_old + KL(π_old ‖ π)))",
    paper="GRPO-Guard, arXiv 2510.22319",
    loss=grpo_guard,
    inputs=("std", "divergence"),
    parameters={"clip_low": (ClipLow, 2e-6), "clip_high": (PositiveFloat, 2e-6)},
)
