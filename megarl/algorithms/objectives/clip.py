"""PPO's clipped surrogate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import ClipLow, PolicyObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

DualClip = Annotated[float, Field(gt=1, allow_inf_nan=False)]


def clip(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return ℓ = −min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A).

    PPO (https://arxiv.org/abs/1707.06347, eq. 7). DAPO's clip-higher (https://arxiv.org/abs/2503.14476) sets clip_high
    > clip_low. With dual_clip c > 1, ℓ ≤ −c·A where A < 0 (https://arxiv.org/abs/1912.09729, eq. 5).
    """
    ratio = policy_ratio(log_prob, old, advantage)
    loss = -(ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    if dual_clip is not None:
        worse = (ratio > dual_clip) & (advantage < 0)
        loss, high = (-dual_clip * advantage).where(worse, loss), high | worse
    return PolicyLoss.of(loss, ratio, low, high)


SPEC = PolicyObjective(
    name="clip",
    formula="−min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A), with A < 0 at most −dual_clip·A",
    paper="PPO, arXiv 1707.06347",
    loss=clip,
    parameters={"clip_low": (ClipLow, 0.2), "clip_high": (PositiveFloat, 0.2), "dual_clip": (DualClip | None, None)},
)
