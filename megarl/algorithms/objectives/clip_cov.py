"""Clip-Cov: PPO's clipped loss, set to 0 for some high-covariance tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.objectives.clip import clip
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import ClipLow, Options, PolicyObjective, Selection
from megarl.core.ranges import FiniteFloat, PositiveFloat

if TYPE_CHECKING:
    import torch


def clip_cov(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    selected: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return PPO's clipped loss, with 0 for the selected tokens: a random subset of those with covariance in bounds.

    Clip-Cov (https://arxiv.org/abs/2505.22617, eq. 11 to 13). The paper excludes tokens that the clip already stops;
    here tokens are selected before the ratio is known. `selected` is bool [N].
    """
    require_one_shape(log_prob=log_prob, selected=selected)
    clipped = clip(log_prob, old, advantage, clip_low, clip_high)
    return clipped._replace(loss=clipped.loss.masked_fill(selected, 0.0))


def random_between_bounds(
    covariance: torch.Tensor, draw: torch.Tensor, covariance_low: float, covariance_high: float
) -> torch.Tensor:
    """Return the selection key, float32 [N]; the tokens with the highest keys are selected. The key is the random draw,
    or −∞ where the covariance is out of bounds. The covariance and the draw, uniform in [0, 1), are float32 [N]."""
    require_one_shape(covariance=covariance, draw=draw)
    is_inside = (covariance >= covariance_low) & (covariance <= covariance_high)
    return draw.where(is_inside, -math.inf)


def covariance_bounds_are_ordered(options: Options) -> str | None:
    low, high = options["covariance_low"], options["covariance_high"]
    if low < high:
        return None
    return (
        f"algorithm.objective.covariance_low={low:g}: it must be below algorithm.objective.covariance_high={high:g}, "
        f"or no token can be selected. Fix: set algorithm.objective.covariance_low below {high:g}"
    )


SPEC = PolicyObjective(
    name="clip_cov",
    formula="as clip, 0 for covariance_share of the tokens, at random from those with "
    "covariance_low ≤ cov(log π_old, A) ≤ covariance_high",
    paper="Clip-Cov, arXiv 2505.22617",
    loss=clip_cov,
    inputs=("selected",),
    parameters={"clip_low": (ClipLow, 0.2), "clip_high": (PositiveFloat, 0.2)},
    selection=Selection(
        order=random_between_bounds,
        parameters={"covariance_low": (FiniteFloat, 1.0), "covariance_high": (FiniteFloat, 5.0)},
        share=2e-4,
    ),
    rules=(covariance_bounds_are_ordered,),
)
