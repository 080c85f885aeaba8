"""CISPO: a clipped importance weight on the log-prob gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import ClipLow, PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def cispo(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip_low: float | None, clip_high: float
) -> PolicyLoss:
    """Return ℓ = −sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π, so every token keeps a gradient.

    CISPO (https://arxiv.org/abs/2506.13585, eq. 4 and 5) has no lower bound (clip_low=None) and tunes clip_high without
    reporting the value. ScaleRL (https://arxiv.org/abs/2510.13786) reports its upper bound, 1 + clip_high = 5.
    """
    ratio = policy_ratio(log_prob, old, advantage).detach()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(lowest, 1 + clip_high)
    return PolicyLoss.of(-weight * advantage * log_prob, ratio, ratio < lowest, ratio > 1 + clip_high)


SPEC = PolicyObjective(
    name="cispo",
    formula="−sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π",
    paper="CISPO of MiniMax-M1, arXiv 2506.13585",
    loss=cispo,
    parameters={"clip_low": (ClipLow | None, None), "clip_high": (PositiveFloat, 4.0)},
)
