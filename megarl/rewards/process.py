"""Process rewards: makes rewards of steps, turns and the whole sample from scores of a response's tokens."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Aggregation = Literal["mean", "sum", "min", "last"]

_AGGREGATIONS: dict[Aggregation, Callable[[Sequence[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "sum": math.fsum,
    "min": min,
    "last": lambda scores: scores[-1],
}


def aggregated(how: Aggregation, scores: Sequence[float]) -> float:
    """Returns one number for at least one score, NaN where one of them is not finite."""
    return _AGGREGATIONS[how](scores) if all(map(math.isfinite, scores)) else math.nan


def on_trained_tokens(scores: Mapping[int, float], mask: ArrayLike) -> list[float]:
    """Returns scores of some tokens (by index) as rewards of all, NaN for one that has none.

    A token that is not trained on is no action: its score is a reward of the last trained one before it, which led to
    it. What comes before the first trained one follows from none of them, and is left out.
    """
    flags = np.asarray(mask, np.bool_).tolist()
    rewards, action = [math.nan] * len(flags), None
    for i, trained in enumerate(flags):
        action = i if trained else action
        if i in scores and action is not None:
            rewards[action] = scores[i] if math.isnan(rewards[action]) else rewards[action] + scores[i]
    return rewards


def turn_ends(mask: ArrayLike) -> list[int]:
    """Returns the indexes of the tokens that end a turn, ascending. A turn is a run of trained tokens: what stands
    between two of them is not the policy's, such as the answer of a tool."""
    trained = np.append(np.asarray(mask, np.bool_), False)
    return np.flatnonzero(trained[:-1] & ~trained[1:]).tolist()


def on_turns(rewards: Sequence[float], mask: ArrayLike) -> list[float]:
    """Returns rewards of the turns, in their order, as rewards of tokens: of the last token of each, NaN elsewhere."""
    return on_trained_tokens(dict(zip(turn_ends(mask), rewards, strict=True)), mask)


def together(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Returns the sum of each token's rewards, NaN for a token that has none. rewards: R from each of their givers."""
    by_token = ([reward for reward in column if not math.isnan(reward)] for column in zip(*rewards, strict=True))
    return [math.fsum(given) if given else math.nan for given in by_token]


def step_ends(pieces: Sequence[str], step_end: str) -> list[int]:
    """Returns the indexes of the tokens that end a step, ascending: those in which an occurrence of the text step_end
    ends, and the last one. pieces: the text of each token of a response."""
    ends = list(accumulate(map(len, pieces)))
    stops = step_stops("".join(pieces), step_end)
    return sorted({*(bisect_left(ends, stop) for stop in stops), len(pieces) - 1})


def step_stops(text: str, step_end: str) -> list[int]:
    """Returns how many characters of the text come up to each occurrence of step_end, itself included."""
    return [found.end() for found in re.finditer(re.escape(step_end), text)]
