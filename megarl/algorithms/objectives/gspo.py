"""GSPO: PPO's clip applied to the sequence-level ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.objectives.clip import clip
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import ClipLow, PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.sample_segments import SampleSegments


def gspo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return ℓ = −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A), where s = exp(mean of log ρ over the sample).

    GSPO (https://arxiv.org/abs/2507.18071, eq. 5 and 7).
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    log_ratio = samples.mean(log_prob - old)
    return clip(log_ratio, log_ratio.new_zeros(log_ratio.shape), advantage, clip_low, clip_high)


SPEC = PolicyObjective(
    name="gspo",
    formula="−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A), s = exp(mean over the sample of log ρ)",
    paper="GSPO, arXiv 2507.18071",
    loss=gspo,
    inputs=("samples",),
    parameters={"clip_low": (ClipLow, 3e-4), "clip_high": (PositiveFloat, 4e-4)},
)
