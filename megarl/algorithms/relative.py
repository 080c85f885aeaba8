"""Rewards against a baseline: estimators of whole samples differ in the baseline and scale only, which are scalars;
`megarl.algorithms.advantages` has their formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def sample_advantages(reward: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return A_i = (r_i − b_i) / c_i, float32 [S], for all tokens of sample i. The arguments are float64 [S]."""
    require_one_shape(reward=reward, baseline=baseline, scale=scale)
    return ((reward - baseline) / scale).float()


def token_advantages(
    reward: torch.Tensor, row_sample: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return (r_t − b_i) / c_i for each token t of sample i that has a reward of its own, 0 for the others.

    Their sum over a token and the rest of its sample is the token's advantage: GRPO with process supervision (arXiv
    2402.03300, section 4.1.3), PRIME's leave-one-out (arXiv 2502.01456, eq. 5).

    reward            float32 [N], NaN for a token without one
    row_sample        int64 [N]
    baseline, scale   float32 [S]
    """
    require_one_shape(reward=reward, row_sample=row_sample)
    require_one_shape(baseline=baseline, scale=scale)
    return ((reward - baseline[row_sample]) / scale[row_sample]).nan_to_num(nan=0.0)
