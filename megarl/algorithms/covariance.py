"""Covariance of a token's log-prob and advantage. Entropy is lost to the few tokens where it is highest
(https://arxiv.org/abs/2505.22617, eq. 10), which clip_cov and kl_cov treat apart.

Covariances are computed, and the tokens chosen, before the first microbatch of an update, from log-probs of the old
policy. The paper takes those of the current policy, which is the same in the first update of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def covariance(old: torch.Tensor, advantage: torch.Tensor, mean_old: float, mean_advantage: float) -> torch.Tensor:
    """Return (log π_old − mean)·(A − mean), float32 [N], the means over all trained tokens of the update."""
    require_one_shape(old=old, advantage=advantage)
    return (old - mean_old) * (advantage - mean_advantage)
