"""Rewards from pairwise comparisons: a judge decides which of two responses to a prompt is better."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from megarl.rewards.options import PROMPT_IMAGE_FILES
from megarl.rewards.result import Result

if TYPE_CHECKING:
    from megarl.core.sample import Sample

NAME = "judge"
"""Name of the judge's reward component and of its function. The function f(prompt, first, second, answer) returns
whether the first response is better, or the probability that it is. It raises an exception if it cannot decide."""

Order = Literal["both", "seeded"]
"""Order in which the responses in a pair are compared, since judges tend to prefer the first one: in both orders
(`both`), or in a random order for each pair (`seeded`)."""

Verdict = float | str
"""Fraction of the group's other responses that a response beats (half for a tie), or the reason why there is no
fraction."""


class Lost(str):
    """Reason why a verdict is missing, if the infrastructure failed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pairwise comparison to be judged."""

    first: Sample
    second: Sample

    @property
    def arguments(self) -> tuple[str, str, str, Any]:
        return self.first.prompt.text, self.first.text, self.second.text, self.first.prompt.answer

    @property
    def columns(self) -> Mapping[str, Any]:
        return {**self.first.prompt.columns, PROMPT_IMAGE_FILES: self.first.prompt.files}


def comparisons(samples: Sequence[Sample], order: Order, seed: int) -> list[Comparison]:
    """Return the comparisons for every pair of responses in a group. Random orders depend on the run's seed."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    if order == "both":
        return [Comparison(*members) for pair in pairs for members in (pair, pair[::-1])]
    return [Comparison(*(pair[::-1] if _is_swapped(pair, seed) else pair)) for pair in pairs]


def _is_swapped(pair: tuple[Sample, Sample], seed: int) -> bool:
    return random.Random(repr((seed, *(sample.id for sample in pair)))).random() < 0.5


def verdicts(samples: Sequence[Sample], results: Iterable[tuple[Comparison, Result]]) -> dict[str, Verdict]:
    """Return the verdicts, keyed by sample id. If a comparison fails, both of its samples fail."""
    wins: dict[str, list[float]] = {sample.id: [] for sample in samples}
    failures: dict[str, Verdict] = {}
    for comparison, result in results:
        first, second = comparison.first.id, comparison.second.id
        if result.failure is None and isinstance(result.value, float) and 0 <= result.value <= 1:
            wins[first].append(result.value)
            wins[second].append(1 - result.value)
        else:
            failure = result.failure or f"returned {result.returned} instead of a bool or a probability"
            reason = f"{failure} on samples {first} and {second}"
            failures |= dict.fromkeys((first, second), Lost(reason) if result.is_infrastructure else reason)
    alone: Verdict = "has no second response to compare with"
    return {name: fmean(shares) if shares else alone for name, shares in wins.items()} | failures
