"""Whitening: advantages with mean 0 and standard deviation 1 over the trained tokens of an update or step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def mean_and_std(count: float, total: float, squares: float, std: str) -> tuple[float, float]:
    """Return the mean and standard deviation of `count` numbers, given their sum (`total`) and sum of squares.
    std="sample" divides the squared deviations by n − 1, "population" by n. The deviation is 1 for "none" and if there
    are too few numbers."""
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
