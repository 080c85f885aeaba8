"""Process rewards: converts per-token scores to rewards of steps, turns and the whole sample."""

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
    """Aggregate at least one score to one number; NaN if a score is not finite."""
    return _AGGREGATIONS[how](scores) if all(map(math.isfinite, scores)) else math.nan


def on_trained_tokens(scores: Mapping[int, float], mask: ArrayLike) -> list[float]:
    """Convert scores of some tokens, by index, to rewards of all tokens, NaN for tokens without one.

    Untrained tokens are not actions, so their scores are added to the last trained token before them, which led to
    them. Scores before the first trained token follow from no action and are dropped.
    """
    flags = np.asarray(mask, np.bool_).tolist()
    rewards, action = [math.nan] * len(flags), None
    for i, trained in enumerate(flags):
        action = i if trained else action
        if i in scores and action is not None:
            rewards[action] = scores[i] if math.isnan(rewards[action]) else rewards[action] + scores[i]
    return rewards


def turn_ends(mask: ArrayLike) -> list[int]:
    """Return the indices of the tokens that end a turn, in ascending order.

    A turn is a run of trained tokens. Tokens between turns, such as a tool's output, are not sampled by the policy.
    """
    trained = np.append(np.asarray(mask, np.bool_), False)
    return np.flatnonzero(trained[:-1] & ~trained[1:]).tolist()


def on_turns(rewards: Sequence[float], mask: ArrayLike) -> list[float]:
    """Convert rewards of the turns, in order, to rewards of tokens: each on the turn's last token, NaN elsewhere."""
    return on_trained_tokens(dict(zip(turn_ends(mask), rewards, strict=True)), mask)


def together(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Sum per-token rewards from several sources, R values each; NaN for a token that has none."""
    by_token = ([reward for reward in column if not math.isnan(reward)] for column in zip(*rewards, strict=True))
    return [math.fsum(token_rewards) if token_rewards else math.nan for token_rewards in by_token]


def step_ends(pieces: Sequence[str], step_end: str) -> list[int]:
    """Return the indices of the tokens that end a step, in ascending order.

    A step ends in the token in which an occurrence of `step_end` ends; the last token also ends one. `pieces` are the
    texts of a response's tokens.
    """
    ends = list(accumulate(map(len, pieces)))
    stops = step_stops("".join(pieces), step_end)
    return sorted({*(bisect_left(ends, stop) for stop in stops), len(pieces) - 1})


def step_stops(text: str, step_end: str) -> list[int]:
    """Return the offset of the end of each occurrence of `step_end` in the text."""
    return [match.end() for match in re.finditer(re.escape(step_end), text)]
