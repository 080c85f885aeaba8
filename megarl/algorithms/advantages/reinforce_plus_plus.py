"""REINFORCE++: rewards-to-go, whitened over the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.returns import reward_to_go
from megarl.algorithms.specs import TokenAdvantages, TokenEstimator
from megarl.core.ranges import Share

if TYPE_CHECKING:
    import torch


def reinforce_plus_plus(
    reward: torch.Tensor, mask: torch.Tensor, row_sample: torch.Tensor, gamma: float
) -> TokenAdvantages:
    """Return A_t = Σ_{s≥t} γ^(s−t)·r_s: REINFORCE++ (https://arxiv.org/abs/2501.03262), before whitening. The arguments
    are as in `reward_to_go`."""
    return TokenAdvantages(reward_to_go(reward, mask, row_sample, gamma))


SPEC = TokenEstimator(
    name="reinforce_plus_plus",
    formula="Σ_{s≥t} γ^(s−t)·r_s, whitened over the update",
    paper="REINFORCE++, arXiv 2501.03262",
    comparison="none",
    estimate=reinforce_plus_plus,
    parameters={"gamma": (Share, 1.0)},
    whitens=True,
)
