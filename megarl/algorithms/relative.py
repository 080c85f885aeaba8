"""Advantages relative to a baseline.

Group and sample estimators differ only in their scalar baseline and scale; the formulas are in
`megarl.algorithms.advantages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def sample_advantages(reward: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return A_i = (r_i − b_i) / c_i, float32 [S], shared by all tokens of sample i. All arguments are float64 [S]."""
    require_one_shape(reward=reward, baseline=baseline, scale=scale)
    return ((reward - baseline) / scale).float()


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
