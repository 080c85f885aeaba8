"""RLOO: rewards minus the mean of the other rewards in the group."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member, deviations_of_others, means_of_others
from megarl.algorithms.specs import Deviation, GroupEstimator
from megarl.core.ranges import NonNegativeFloat
from megarl.core.score import Baseline, TokenTotals


def rloo(group: Sequence[Member], std: str, std_epsilon: float) -> list[Baseline]:
    """Return b_i = Σ_{j≠i} r_j / (n − 1): RLOO (https://arxiv.org/abs/2402.14740, section 3.2). std="none" sets c_i =
    1. "sample" or "population" sets c_i = std(r_j, j≠i) + std_epsilon, or 1 if that deviation is 0. Like the baseline,
    c_i does not depend on r_i, as in NeMo-RL."""
    return [Baseline(center, scale) for center, scale in _against_others([m.reward for m in group], std, std_epsilon)]


def prime(group: Sequence[TokenTotals], std: str, std_epsilon: float) -> list[tuple[float, float]]:
    """Return (center, scale) for each sample, computed as in `rloo` from each sample's mean token reward: PRIME
    (https://arxiv.org/abs/2502.01456, eq. 5)."""
    return _against_others([totals.total / max(totals.count, 1) for totals in group], std, std_epsilon)


def _against_others(rewards: Sequence[float], std: str, std_epsilon: float) -> list[tuple[float, float]]:
    centers = means_of_others(rewards)
    if std == "none":
        return [(center, 1.0) for center in centers]
    deviations = deviations_of_others(rewards, std)
    return [
        (c, deviation + std_epsilon if deviation else 1.0) for c, deviation in zip(centers, deviations, strict=True)
    ]


SPEC = GroupEstimator(
    name="rloo",
    formula="r_i − mean(r of the other samples), divided by their deviation unless std=none",
    paper="RLOO, arXiv 2402.14740",
    compare=rloo,
    compare_tokens=prime,
    parameters={"std": (Deviation, "none"), "std_epsilon": (NonNegativeFloat, 1e-6)},
)
