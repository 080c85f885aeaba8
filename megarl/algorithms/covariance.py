"""How log-prob and advantage of a token vary together. The few tokens where they do most are what entropy is lost to
(https://arxiv.org/abs/2505.22617, eq. 10), which clip_cov and kl_cov treat apart.

Covariances are taken, as the tokens are chosen, before the first microbatch of an update, from log-probs of the old
policy: the paper's are of the current one, which is the same in the first update of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def covariance(old: torch.Tensor, advantage: torch.Tensor, mean_old: float, mean_advantage: float) -> torch.Tensor:
    """(log π_old − mean)·(A − mean), the means over all trained tokens of the update. float32 [N]."""
    require_one_shape(old=old, advantage=advantage)
    return (old - mean_old) * (advantage - mean_advantage)
