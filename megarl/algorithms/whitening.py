"""Advantages with mean 0 and standard deviation 1 over the trained tokens of a whole update, or step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def mean_and_std(count: float, total: float, squares: float, std: str) -> tuple[float, float]:
    """Return mean and standard deviation of `count` numbers with this sum and sum of squares.

    std: "sample" divides the squared deviations by n − 1, "population" by n. The deviation is 1 for "none" and for too
    few numbers.
    """
    divisor = {"sample": count - 1, "population": count, "none": 0}[std]
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squares - count * mean**2, 0.0) / divisor) if divisor > 0 else 1.0


def whiten(advantage: torch.Tensor, mask: torch.Tensor, mean: float, std: float, std_epsilon: float) -> torch.Tensor:
    """Return (A − mean) / (std + ε) where the mask is True, and 0 elsewhere, also everywhere if std + ε is 0. Mean and
    std are those of the trained tokens of a whole update, or of all updates of a step.

    advantage, mask   float32 and bool [N]
    """
    require_one_shape(advantage=advantage, mask=mask)
    return ((advantage - mean) / (std + std_epsilon or 1.0)).where(mask, 0.0)
