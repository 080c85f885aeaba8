"""Reward statistics of a group (the samples of one prompt), from scalars that the driver holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.batch import GroupStatistics


def group_statistics(rewards: Sequence[float], std: str) -> GroupStatistics:
    """std: "sample" divides the squared deviations by n − 1, "population" by n; "none" makes it 1.

    A group of one has no deviation from its own mean: its std is 0 (or 1 under "none"), its advantage 0.
    """
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if std == "none":
        return GroupStatistics(mean, 1.0, n)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    divisor = n - 1 if std == "sample" else n
    return GroupStatistics(mean, math.sqrt(squares / divisor) if divisor else 0.0, n)
