"""KL to the reference policy as a per-token reward."""

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
    """Return −coefficient · KL to the reference, float32 [R], for one sample's response; 0 where the mask is false.

    Level "token": r_t = −β·K(d_t) with d = log π_old − log π_ref, a reward at each trained token (InstructGPT with k1,
    arXiv 2203.02155, eq. 2; REINFORCE++, arXiv 2501.03262). Level "sequence": −β·K(Σ_t d_t) at the last trained token.

    Args:
        old: float32 [R], log-probs under the policy that sampled the response.
        reference: float32 [R], log-probs under the reference policy.
        mask: bool [R], true for trained tokens.
        limit: the bound on the estimates, as in `megarl.algorithms.kl.estimate`.
    """
    require_one_shape(old=old, reference=reference, mask=mask)
    log_ratio = (old - reference).where(mask, 0.0)
    if level == "token":
        return (-coefficient * estimate(estimator, log_ratio, limit=limit)).where(mask, 0.0)
    reward = old.new_zeros(old.shape)
    reward[mask.nonzero()[-1:, 0]] = -coefficient * estimate(estimator, log_ratio.sum(), limit=limit)
    return reward
