"""Pairs of sampled responses for pairwise objectives."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.step.scoring import ScoredSample


def best_and_worst(groups: Sequence[Sequence[ScoredSample]]) -> list[ScoredSample]:
    """Return the samples with the highest and the lowest reward of each group, the first one among equals. A group
    whose rewards are all equal has no pair."""
    pairs = []
    for group in groups:
        best, worst = (choose(group, key=lambda item: item.reward) for choose in (max, min))
        pairs += [best, worst] if best.reward > worst.reward else []
    return pairs
