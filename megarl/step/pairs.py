"""Selection of response pairs for pairwise objectives."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.types import SampleRef


def best_and_worst(groups: Sequence[Sequence[SampleRef]]) -> list[SampleRef]:
    """Return the samples with the highest and the lowest reward in each group. Ties go to the first sample. A group
    whose rewards are all equal yields no pair."""
    pairs = []
    for group in groups:
        best, worst = (choose(group, key=lambda item: item.reward) for choose in (max, min))
        pairs += [best, worst] if best.reward > worst.reward else []
    return pairs
