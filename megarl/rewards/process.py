"""Process rewards: converts per-token scores to rewards for steps, turns and the whole sample."""

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


def aggregated(aggregation: Aggregation, scores: Sequence[float]) -> float:
    """Aggregate one or more scores into one number. Return NaN if a score is not finite."""
    return _AGGREGATIONS[aggregation](scores) if all(map(math.isfinite, scores)) else math.nan


def on_trained_tokens(scores: Mapping[int, float], mask: ArrayLike) -> list[float]:
    """Convert the scores of some tokens, keyed by token index, to one reward per token. Tokens without a reward get
    NaN. Untrained tokens are not actions, so their scores are added to the preceding trained token. Scores before the
    first trained token do not result from an action, so they are dropped."""
    flags = np.asarray(mask, np.bool_).tolist()
    rewards, action = [math.nan] * len(flags), None
    for i, trained in enumerate(flags):
        action = i if trained else action
        if i in scores and action is not None:
            rewards[action] = scores[i] if math.isnan(rewards[action]) else rewards[action] + scores[i]
    return rewards


def turn_ends(mask: ArrayLike) -> list[int]:
    """Return the indices of the tokens that end a turn, in ascending order. A turn is a run of trained tokens. Tokens
    between turns, such as a tool's output, are not sampled by the policy."""
    trained = np.append(np.asarray(mask, np.bool_), False)
    return np.flatnonzero(trained[:-1] & ~trained[1:]).tolist()


def on_turns(rewards: Sequence[float], mask: ArrayLike) -> list[float]:
    """Convert rewards per turn to rewards per token: a turn's last token gets its reward, all other tokens get NaN."""
    return on_trained_tokens(dict(zip(turn_ends(mask), rewards, strict=True)), mask)


def together(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Sum per-token rewards from several sources, with R values each. A token without any reward gets NaN."""
    by_token = ([reward for reward in column if not math.isnan(reward)] for column in zip(*rewards, strict=True))
    return [math.fsum(token_rewards) if token_rewards else math.nan for token_rewards in by_token]


def step_ends(pieces: Sequence[str], step_end: str) -> list[int]:
    """Return the indices of the tokens that end a step, in ascending order. A step ends at each token in which an
    occurrence of `step_end` ends, and at the last token. `pieces` contains the text of each response token."""
    ends = list(accumulate(map(len, pieces)))
    stops = step_stops("".join(pieces), step_end)
    return sorted({*(bisect_left(ends, stop) for stop in stops), len(pieces) - 1})


def step_stops(text: str, step_end: str) -> list[int]:
    """Return the end offset of each occurrence of `step_end` in the text."""
    return [match.end() for match in re.finditer(re.escape(step_end), text)]
