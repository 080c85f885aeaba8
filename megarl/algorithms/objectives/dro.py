"""DRO: regression of log-ratios on advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megarl.algorithms.policy_loss import PolicyLoss, ratio_of
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.sample_segments import SampleSegments


def dro(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, samples: SampleSegments, tau: float, level: str
) -> PolicyLoss:
    """Return ℓ = ½·(A − τ·R)², where R = Σ log ρ over the sample.

    DRO (https://arxiv.org/abs/2405.19107, eq. 4), where A is the reward minus a value and π_old is a fixed reference.
    Level "token" sets R to the token's own log ρ, a variant that is also published as DRO.
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    log_ratio = log_prob - old
    return PolicyLoss.of((advantage - tau * samples.at_level(level, log_ratio)).square() / 2, ratio_of(log_ratio))


SPEC = PolicyObjective(
    name="dro",
    formula="½·(A − τ·R)², R = Σ over the sample of log ρ",
    paper="DRO, arXiv 2405.19107",
    loss=dro,
    inputs=("samples",),
    parameters={"tau": (PositiveFloat, 1.0), "level": (Literal["token", "sequence"], "sequence")},
)
