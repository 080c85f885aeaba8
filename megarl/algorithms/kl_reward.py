"""The divergence from the reference as a reward of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.kl import estimate
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def kl_reward(
    old: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    coefficient: float,
    estimator: str,
    level: str,
    limit: float | None = None,
) -> torch.Tensor:
    """Return −coefficient · KL of one sample's response to the reference, under the policy that sampled it.

    level "token": r_t = −β·K(d_t) with d = log π_old − log π_ref, a reward of each trained token (InstructGPT's with
    k1, arXiv 2203.02155, eq. 2; REINFORCE++, arXiv 2501.03262). level "sequence": −β·K(Σ_t d_t), on the last trained
    token.

    old, reference   float32 [R], log-probs
    mask             bool [R], the trained tokens
    limit            of the estimates
    returns          float32 [R], 0 where the mask is False
    """
    require_one_shape(old=old, reference=reference, mask=mask)
    log_ratio = (old - reference).where(mask, 0.0)
    if level == "token":
        return (-coefficient * estimate(estimator, log_ratio, limit=limit)).where(mask, 0.0)
    reward = old.new_zeros(old.shape)
    reward[mask.nonzero()[-1:, 0]] = -coefficient * estimate(estimator, log_ratio.sum(), limit=limit)
    return reward
