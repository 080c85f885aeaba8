"""GMPO: the geometric mean of a sample's clipped ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, ratio_of
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.sample_segments import SampleSegments


def gmpo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return ℓ = −A·exp(mean of c over the sample): the geometric mean of individually clipped token ratios.

    c = min(log ρ, clip_high) where A > 0, else max(log ρ, −clip_low). The clip applies to the log-ratio. GMPO
    (https://arxiv.org/abs/2507.20673, eq. 4 and algorithm 1).
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    log_ratio = log_prob - old
    clipped = log_ratio.clamp(max=clip_high).where(advantage > 0, log_ratio.clamp(min=-clip_low))
    ratio = ratio_of(samples.mean(clipped))
    low = (log_ratio < -clip_low) & (advantage < 0)
    high = (log_ratio > clip_high) & (advantage > 0)
    return PolicyLoss.of(-advantage * ratio, ratio, low, high)


SPEC = PolicyObjective(
    name="gmpo",
    formula="−A·exp(mean over the sample of c), c = min(log ρ, clip_high) where A > 0, else max(log ρ, −clip_low)",
    paper="GMPO, arXiv 2507.20673",
    loss=gmpo,
    inputs=("samples",),
    parameters={"clip_low": (PositiveFloat, 0.4), "clip_high": (PositiveFloat, 0.4)},
)
