"""Process rewards: from scores of a response's tokens to those of its steps, and to one reward for the sample."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

Aggregation = Literal["mean", "sum", "min", "last"]

_AGGREGATIONS: dict[Aggregation, Callable[[Sequence[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "sum": math.fsum,
    "min": min,
    "last": lambda scores: scores[-1],
}


def aggregated(how: Aggregation, scores: Sequence[float]) -> float:
    """One number for at least one score. Not finite where one of them is not."""
    return _AGGREGATIONS[how](scores) if all(map(math.isfinite, scores)) else math.nan


def on_trained_tokens(scores: Mapping[int, float], mask: Sequence[bool]) -> list[float]:
    """Scores of some tokens (by index) as rewards of all, NaN for one that has none.

    A token that is not trained on is no action: its score is a reward of the last trained one before it, which led to
    it. What comes before the first trained one follows from none of them, and is left out.
    """
    rewards, action = [math.nan] * len(mask), None
    for i, trained in enumerate(mask):
        action = i if trained else action
        if i in scores and action is not None:
            rewards[action] = scores[i] if math.isnan(rewards[action]) else rewards[action] + scores[i]
    return rewards


def step_ends(pieces: Sequence[str], step_end: str) -> list[int]:
    """Indexes of the tokens that end a step, ascending: those in which an occurrence of the text step_end ends, and the
    last one. pieces: the text of each token of a response."""
    ends = list(accumulate(map(len, pieces)))
    stops = step_stops("".join(pieces), step_end)
    return sorted({*(bisect_left(ends, stop) for stop in stops), len(pieces) - 1})


def step_stops(text: str, step_end: str) -> list[int]:
    """How many characters of the text come up to each occurrence of step_end, itself included."""
    return [found.end() for found in re.finditer(re.escape(step_end), text)]
