"""Rewards against the mean of the others in their group."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member, means_of_others
from megarl.algorithms.specs import GroupEstimator
from megarl.core.types import Baseline, TokenTotals


def rloo(group: Sequence[Member]) -> list[Baseline]:
    """b_i = Σ_{j≠i} r_j / (n − 1): RLOO (https://arxiv.org/abs/2402.14740, section 3.2)."""
    return [Baseline(others) for others in means_of_others([member.reward for member in group])]


def prime(group: Sequence[TokenTotals]) -> list[tuple[float, float]]:
    """Returns for each sample the mean over the others of the mean of their tokens' rewards: PRIME
    (https://arxiv.org/abs/2502.01456, eq. 5)."""
    means = [totals.total / max(totals.count, 1) for totals in group]
    return [(others, 1.0) for others in means_of_others(means)]


SPEC = GroupEstimator(
    name="rloo",
    formula="r_i − mean of the others' r",
    paper="RLOO, arXiv 2402.14740",
    compare=rloo,
    compare_tokens=prime,
)
