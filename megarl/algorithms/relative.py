"""Advantages relative to a baseline, and whitening: advantages with mean 0 and standard deviation 1 over the trained
tokens of an update or step.

Group and sample estimators differ only in their scalar baseline and scale; the formulas are in
`megarl.algorithms.advantages`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def sample_advantages(
    reward: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor, limit: float | None = None
) -> torch.Tensor:
    """Return A_i = (r_i − b_i) / c_i, float32 [S], shared by all tokens of sample i. All arguments are float64 [S].
    With a limit, A_i is clamped to ±limit, as in Flow-GRPO (https://arxiv.org/abs/2505.05470, limit 5)."""
    require_one_shape(reward=reward, baseline=baseline, scale=scale)
    advantage = ((reward - baseline) / scale).float()
    return advantage if limit is None else advantage.clamp(-limit, limit)


def token_advantages(
    reward: torch.Tensor, row_sample: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return (r_t − b_i) / c_i, float32 [N], for each token t of sample i with a token reward; 0 for all other tokens.

    A token's advantage is the sum of these values from the token to the end of its sample: GRPO with process
    supervision (arXiv 2402.03300, section 4.1.3), PRIME's leave-one-out (arXiv 2502.01456, eq. 5).

    Args:
        reward: float32 [N], NaN for a token without a reward.
        row_sample: int64 [N], index of each row's sample.
        baseline: float32 [S].
        scale: float32 [S].
    """
    require_one_shape(reward=reward, row_sample=row_sample)
    require_one_shape(baseline=baseline, scale=scale)
    return ((reward - baseline[row_sample]) / scale[row_sample]).nan_to_num(nan=0.0)


def covariance(old: torch.Tensor, advantage: torch.Tensor, mean_old: float, mean_advantage: float) -> torch.Tensor:
    """Return (log π_old − mean)·(A − mean), float32 [N]. The means are over all trained tokens of the update.

    The few tokens with the highest covariance account for most of the entropy loss (https://arxiv.org/abs/2505.22617,
    eq. 10). The paper uses the current policy's log-probs, which are identical in the first update of a step.
    """
    require_one_shape(old=old, advantage=advantage)
    return (old - mean_old) * (advantage - mean_advantage)


def mean_and_std(count: float, total: float, squares: float, std: str) -> tuple[float, float]:
    """Return the mean and standard deviation of `count` numbers, given their sum (`total`) and sum of squares.
    std="sample" divides the squared deviations by n − 1, "population" by n. The standard deviation is 1 for "none" and
    for too few numbers."""
    divisor = {"sample": count - 1, "population": count, "none": 0}[std]
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squares - count * mean**2, 0.0) / divisor) if divisor > 0 else 1.0


def whiten(advantage: torch.Tensor, mask: torch.Tensor, mean: float, std: float, std_epsilon: float) -> torch.Tensor:
    """Return (A − mean) / (std + ε) where the mask is true, else 0. If std + ε is 0, the divisor is 1.

    Args:
        advantage: float32 [N].
        mask: bool [N], true for trained tokens.
        mean: mean over the trained tokens in the whole update, or in all updates of the step.
        std: standard deviation over the same tokens.
    """
    require_one_shape(advantage=advantage, mask=mask)
    return ((advantage - mean) / (std + std_epsilon or 1.0)).where(mask, 0.0)
