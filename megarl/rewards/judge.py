"""Rewards by comparison: a judge says which of two responses to a prompt is the better one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from numbers import Real
from statistics import fmean
from typing import Any

from megarl.core.types import Sample

Judge = Callable[[str, str, str, Any], bool | float]
"""A function f(prompt, first, second, answer) that returns whether the first response is better, or the probability of
that, and raises where it cannot tell."""

NAME = "judge"
"""The name of the judge's part of the reward."""

Verdict = float | str
"""The share of the other responses to its prompt that a response is better than, a tie counting half; or the reason why
there is none."""


def verdicts(judge: Judge, samples: Sequence[Sample]) -> dict[str, Verdict]:
    """Returns the verdicts by sample id. Each two responses to a prompt are compared once; a comparison that fails is a
    failure of both."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample)
    wins: dict[str, list[float]] = {sample.id: [] for sample in samples}
    failures: dict[str, Verdict] = {}
    for first, second in (pair for group in groups.values() for pair in combinations(group, 2)):
        try:
            share = _share(judge(first.prompt.text, first.text, second.text, first.prompt.answer))
        except Exception as error:  # the user's code may raise anything
            reason = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
            failures |= dict.fromkeys((first.id, second.id), f"{reason} on samples {first.id} and {second.id}")
        else:
            wins[first.id].append(share)
            wins[second.id].append(1 - share)
    alone: Verdict = "has no other response to compare it with"
    return {name: fmean(shares) if shares else alone for name, shares in wins.items()} | failures


def _share(result: Any) -> float:
    if not isinstance(result, Real) or not 0 <= float(result) <= 1:
        raise ValueError(f"it returned {result!r}, not a bool or a probability")
    return float(result)
