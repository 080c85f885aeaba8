"""The pairs of sampled responses that are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.step.scoring import ScoredSample


def best_and_worst(groups: Sequence[Sequence[ScoredSample]]) -> list[ScoredSample]:
    """Returns the sample with the highest reward and the one with the lowest of each group, of equal ones the first. A
    group whose rewards are all equal has no pair."""
    pairs = []
    for group in groups:
        best, worst = (choose(group, key=lambda item: item.reward) for choose in (max, min))
        pairs += [best, worst] if best.reward > worst.reward else []
    return pairs
