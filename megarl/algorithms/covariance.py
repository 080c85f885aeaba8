"""Covariance of a token's log-prob and advantage.

The few tokens with the highest covariance account for most of the entropy loss (https://arxiv.org/abs/2505.22617, eq.
10); clip_cov and kl_cov treat them separately. Before the first microbatch of an update, covariances are computed from
the old policy's log-probs and tokens are selected. The paper uses the current policy's log-probs, which are identical
in the first update of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def covariance(old: torch.Tensor, advantage: torch.Tensor, mean_old: float, mean_advantage: float) -> torch.Tensor:
    """Return (log π_old − mean)·(A − mean), float32 [N]. The means are over all trained tokens of the update."""
    require_one_shape(old=old, advantage=advantage)
    return (old - mean_old) * (advantage - mean_advantage)
