"""GDPO: normalize each reward within its group, then normalize their weighted sum over the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megarl.algorithms.baselines import Member, mean, scale_of, standard_deviation
from megarl.algorithms.specs import Deviation, GroupEstimator
from megarl.core.ranges import NonNegativeFloat
from megarl.core.score import Baseline, RewardPart


def gdpo(group: Sequence[Member], std: str, std_epsilon: float, step_std: str) -> list[Baseline]:
    """Return each sample's advantage before the normalization over the step, expressed as a baseline for its reward:
    A_i = Σ_k w_k·(r_ik − mean(r_k)) / (std(r_k) + std_epsilon), where k indexes the rewards and w_k are their weights
    (https://arxiv.org/abs/2601.05242).

    The remainder of a sample's reward (the KL and per-token rewards) is centered on its group mean but not scaled. The
    reward of a sample without `parts` counts as a single part.

    Args:
        std: "sample" divides the squared deviations by n − 1, "population" by n. "none" skips the division.
        step_std: as in `step_moments`.
    """
    return [
        Baseline(member.reward - advantage)
        for member, advantage in zip(group, _advantages(group, std, std_epsilon), strict=True)
    ]


def step_moments(
    groups: Sequence[Sequence[Member]], std: str, std_epsilon: float, step_std: str
) -> tuple[float, float] | None:
    """Return mean(A) and std(A) + std_epsilon over the samples in all groups of the step, counting each rollout once
    (https://arxiv.org/abs/2601.05242). Groups of one sample are excluded, because their rewards are not
    compared. step_std="none" skips the normalization."""
    sums = [a for group in groups if len(group) > 1 for a in _advantages(group, std, std_epsilon)]
    if step_std == "none" or not sums:
        return None
    return mean(sums), scale_of(standard_deviation(sums, step_std), std_epsilon)


def _advantages(group: Sequence[Member], std: str, std_epsilon: float) -> list[float]:
    rewards = [member.parts or {"": RewardPart(member.reward)} for member in group]
    remainders = [_remainder(member.reward, parts.values()) for member, parts in zip(group, rewards, strict=True)]
    terms = [_normalized(remainders, 1.0, "none", std_epsilon)]
    for name, part in rewards[0].items():
        terms.append(_normalized([parts[name].value for parts in rewards], part.weight, std, std_epsilon))
    return [math.fsum(of_sample) for of_sample in zip(*terms, strict=True)]


def _remainder(reward: float, parts: Iterable[RewardPart]) -> float:
    """Return the reward minus the weighted sum of its parts, without the rounding error of their sum."""
    terms = [reward, *(-part.weight * part.value for part in parts)]
    difference = math.fsum(terms)
    return difference if abs(difference) > 1e-12 * max(map(abs, terms)) else 0.0


def _normalized(rewards: Sequence[float], weight: float, std: str, std_epsilon: float) -> list[float]:
    """Return w·(r_i − mean(r)) / (std(r) + std_epsilon) for each of the rewards r."""
    center = mean(rewards)
    scale = 1.0 if std == "none" else scale_of(standard_deviation(rewards, std), std_epsilon)
    return [weight * (reward - center) / scale for reward in rewards]


SPEC = GroupEstimator(
    name="gdpo",
    formula="Σ_k w_k·(r_ik − mean(r_k)) / (std(r_k) + std_epsilon) over rewards k, normalized over the step",
    paper="GDPO, arXiv 2601.05242",
    compare=gdpo,
    separates_rewards=True,
    step_moments=step_moments,
    parameters={
        "std": (Deviation, "sample"),
        "std_epsilon": (NonNegativeFloat, 1e-6),
        "step_std": (Deviation, "sample"),
    },
)
