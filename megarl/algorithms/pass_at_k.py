"""What a sample is worth if the best of k samples counts: exact expectations over all sets of k of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_of_k(rewards: Sequence[float], k: int) -> list[float]:
    """Probabilities with which each of the rewards is the best of k that are drawn without replacement; of equal ones
    the later in the list counts as the better. C(j, k−1) / C(n, k) for the one with j below it."""
    _check(rewards, k)
    sets = math.comb(len(rewards), k)
    ranks = _ranks(rewards)
    return [math.comb(rank, k - 1) / sets for rank in ranks]


def against_all(rewards: Sequence[float], k: int) -> tuple[list[float], float]:
    """E[max of k | i among them] − E[max of k] of each sample i, and the standard deviation of the max of k.

    With the deviation as scale: the analytical advantage of pass@k training (arXiv 2508.10751, eq. 14 and 15), here for
    any rewards, not of 0 and 1 only.
    """
    chances = best_of_k(rewards, k)
    best = max(rewards)
    rewards = [reward - best for reward in rewards]  # exactly 0 where every set of k has it
    mean = math.fsum(p * reward for p, reward in zip(chances, rewards, strict=True))
    variance = math.fsum(p * (reward - mean) ** 2 for p, reward in zip(chances, rewards, strict=True))
    n, ranks = len(rewards), _ranks(rewards)
    ordered = sorted(rewards)
    sets = math.comb(n - 1, k - 1)
    with_own = []
    for own, rank in zip(rewards, ranks, strict=True):
        # i is the best where all others are below it; else the best is some j above i, with i among those below j.
        above = (ordered[j] * math.comb(j - 1, k - 2) for j in range(rank + 1, n) if k >= 2)
        with_own.append((own * math.comb(rank, k - 1) + math.fsum(above)) / sets)
    return [value - mean for value in with_own], math.sqrt(variance)


def against_without(rewards: Sequence[float], k: int) -> list[float]:
    """(1 / C(n, k)) · Σ over sets S of k with i among them of (max S − max S without i): leave-one-out policy
    optimisation of max@k (arXiv 2505.15201, section 4); with k = n the best one minus the second, 0 for the others
    (arXiv 2503.19595)."""
    _check(rewards, k)
    ordered, sets = sorted(rewards), math.comb(len(rewards), k)
    # Only the best of a set has a share: its lead on the best of the k − 1 others, all below it.
    return [
        math.fsum((ordered[rank] - ordered[j]) * math.comb(j, k - 2) for j in range(rank)) / sets
        if k >= 2
        else reward / sets
        for reward, rank in zip(rewards, _ranks(rewards), strict=True)
    ]


def _ranks(rewards: Sequence[float]) -> list[int]:
    """How many are below each; of equal ones the later in the list is above."""
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    ranks = [0] * len(rewards)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def _check(rewards: Sequence[float], k: int) -> None:
    if not 1 <= k <= len(rewards):
        raise ValueError(f"k={k}: there are {len(rewards)} samples to choose k from")
