"""Advantages for pass@k: exact expectations of the best reward over all k-subsets of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from megarl.algorithms.baselines import Member, scale_of
from megarl.algorithms.specs import GroupEstimator, Options
from megarl.core.ranges import NonNegativeFloat, PositiveInt
from megarl.core.score import Baseline


def pass_at_k(group: Sequence[Member], k: int, pass_at_k_baseline: str, std: str, std_epsilon: float) -> list[Baseline]:
    """Return each sample's advantage, expressed as a baseline for its reward: `against_all` divided by the standard
    deviation over the k-subsets, or `against_without`.

    Args:
        k: subset size, limited to the number of samples in the group (some rewards may have failed). With
            pass_at_k_baseline="all" the limit is one less, because the only subset of full size contains every sample.
        std: "none" skips the division. "population" uses the population standard deviation, because all k-subsets are
            enumerated.
    """
    rewards = [member.reward for member in group]
    k = min(k, len(rewards) - (pass_at_k_baseline == "all"))
    if pass_at_k_baseline == "without":
        return [Baseline(r - advantage) for r, advantage in zip(rewards, against_without(rewards, k), strict=True)]
    advantages, deviation = against_all(rewards, k)
    scale = 1.0 if std == "none" else scale_of(deviation, std_epsilon)
    return [Baseline(r - advantage, scale) for r, advantage in zip(rewards, advantages, strict=True)]


def best_of_k(rewards: Sequence[float], k: int) -> list[float]:
    """Return the probability that each reward is the largest of k rewards drawn without replacement: C(j, k−1) / C(n,
    k) for a reward with j rewards below it. Among equal rewards, the later one in the list ranks higher."""
    _check(rewards, k)
    sets = math.comb(len(rewards), k)
    return [math.comb(rank, k - 1) / sets for rank in _ranks(rewards)]


def against_all(rewards: Sequence[float], k: int) -> tuple[list[float], float]:
    """Return E[max of k | subset contains i] − E[max of k] for each sample i, and the standard deviation of the max of
    k.

    Divided by that deviation, this is the analytical advantage of pass@k training (arXiv 2508.10751, eq. 14 and 15),
    generalized from rewards of 0 and 1 to arbitrary rewards.
    """
    chances = best_of_k(rewards, k)
    best = max(rewards)
    rewards = [reward - best for reward in rewards]  # makes the mean exactly 0 if every k-subset has the best reward
    mean = math.fsum(p * reward for p, reward in zip(chances, rewards, strict=True))
    variance = math.fsum(p * (reward - mean) ** 2 for p, reward in zip(chances, rewards, strict=True))
    n, ranks = len(rewards), _ranks(rewards)
    ordered = sorted(rewards)
    sets = math.comb(n - 1, k - 1)
    expected_best = []
    for reward, rank in zip(rewards, ranks, strict=True):
        # Either i is the best member of the subset, or a higher-ranked j is and i is one of the members below j.
        above = (ordered[j] * math.comb(j - 1, k - 2) for j in range(rank + 1, n) if k >= 2)
        expected_best.append((reward * math.comb(rank, k - 1) + math.fsum(above)) / sets)
    return [value - mean for value in expected_best], math.sqrt(variance)


def against_without(rewards: Sequence[float], k: int) -> list[float]:
    """Return (1 / C(n, k)) · Σ (max S − max(S∖{i})) over the k-subsets S that contain i, for each i.

    Leave-one-out policy optimization of max@k (arXiv 2505.15201, section 4). With k = n, the best sample's advantage is
    its lead over the second best, and all other advantages are 0 (arXiv 2503.19595).
    """
    _check(rewards, k)
    ordered, sets = sorted(rewards), math.comb(len(rewards), k)
    # Only the best member of a subset contributes: its lead over the best of the other k − 1 members.
    return [
        math.fsum((ordered[rank] - ordered[j]) * math.comb(j, k - 2) for j in range(rank)) / sets
        if k >= 2
        else reward / sets
        for reward, rank in zip(rewards, _ranks(rewards), strict=True)
    ]


def _ranks(rewards: Sequence[float]) -> list[int]:
    """Return the rank of each reward: the number of rewards below it. Among equal rewards, the later one in the list
    ranks higher."""
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    ranks = [0] * len(rewards)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def _check(rewards: Sequence[float], k: int) -> None:
    if not 1 <= k <= len(rewards):
        raise ValueError(f"k={k}: k must be between 1 and the number of samples, {len(rewards)}")


def k_is_at_most_the_group_size(options: Options, samples_per_prompt: int) -> str | None:
    """Require k to be at most `samples_per_prompt`. With pass_at_k_baseline=all, k must be less, because a single
    subset makes every advantage 0."""
    k, all_sets = options["k"], options["pass_at_k_baseline"] == "all"
    if samples_per_prompt < 2:  # reported by the rule for all group estimators
        return None
    if k > samples_per_prompt:
        return (
            f"algorithm.advantage.k={k}: it exceeds batch.samples_per_prompt={samples_per_prompt}. Fix: set "
            f"algorithm.advantage.k to at most {samples_per_prompt - all_sets}"
        )
    if k == samples_per_prompt and all_sets:
        return (
            f"algorithm.advantage.k={k}: it equals batch.samples_per_prompt={samples_per_prompt}, so there is only one "
            f"subset of k samples and every advantage is 0. Fix: set algorithm.advantage.k to at most {k - 1}, or "
            "algorithm.advantage.pass_at_k_baseline=without"
        )
    return None


SPEC = GroupEstimator(
    name="pass_at_k",
    formula="(E[max r of k samples, including i] − E[max r of k samples]) / (std[max r of k samples] + std_epsilon)",
    paper="Pass@k training, arXiv 2508.10751",
    compare=pass_at_k,
    parameters={
        "k": (PositiveInt, 4),
        "pass_at_k_baseline": (Literal["all", "without"], "all"),
        "std": (Literal["population", "none"], "population"),
        "std_epsilon": (NonNegativeFloat, 1e-6),
    },
    rules=(k_is_at_most_the_group_size,),
)
