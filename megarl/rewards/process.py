"""Process rewards: from scores of a response's tokens to those of its steps, and to one reward for the sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """Scores of some tokens (by index) as rewards of all, 0 for most.

    A token that is not trained on is no action: its score is a reward of the last trained one before it, which led to
    it. What comes before the first trained one follows from none of them, and is left out.
    """
    rewards, action = [0.0] * len(mask), None
    for i, trained in enumerate(mask):
        action = i if trained else action
        if i in scores and action is not None:
            rewards[action] += scores[i]
    return rewards


def step_ends(pieces: Sequence[str], step_end: str) -> list[int]:
    """Indexes of the tokens that end a step, ascending: those in which an occurrence of the text step_end ends, and the
    last one. pieces: the text of each token of a response."""
    text, ends, token, seen = "".join(pieces), set(), 0, 0
    start = text.find(step_end)
    while start >= 0:
        stop = start + len(step_end)
        while seen + len(pieces[token]) < stop:
            seen += len(pieces[token])
            token += 1
        ends.add(token)
        start = text.find(step_end, stop)
    return sorted(ends | {len(pieces) - 1})
