"""Baselines of the samples of a group (those of one prompt), from scalars that the driver holds: the functions that
estimators of whole samples share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.types import NO_TOTALS, TokenTotals


@dataclass(frozen=True, slots=True)
class Member:
    """A sample of a group, as its estimator sees it.

    reward                the reward of the sample as a whole
    num_tokens            the number of its trained tokens
    token_reward_totals   sums over the rewards of single tokens, where each of these is compared by itself
    greedy                the reward of a greedy response to the same prompt, if the estimator compares with it
    earlier               the moving average of the mean rewards of earlier steps
    """

    reward: float
    num_tokens: int
    token_reward_totals: TokenTotals = NO_TOTALS
    greedy: float = 0.0
    earlier: float = 0.0


def mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def means_of_others(rewards: Sequence[float]) -> list[float]:
    """Return b_i = Σ_{j≠i} r_j / (n − 1) of at least two rewards."""
    return [math.fsum((*rewards[:i], *rewards[i + 1 :])) / (len(rewards) - 1) for i in range(len(rewards))]


def scale_of(deviation: float, std_epsilon: float) -> float:
    """Return the divisor of advantages, 1 in place of 0: rewards that do not deviate have the advantage 0."""
    return deviation + std_epsilon or 1.0


def standard_deviation(rewards: Sequence[float], std: str) -> float:
    """Return the standard deviation, exactly 0 for equal rewards, whose mean may differ from them by rounding.

    std: "sample" divides the squared deviations by n − 1, "population" by n.
    """
    if min(rewards) == max(rewards):
        return 0.0
    average = mean(rewards)
    divisor = len(rewards) - 1 if std == "sample" else len(rewards)
    return math.sqrt(math.fsum((r - average) ** 2 for r in rewards) / divisor)


def deviations_of_others(rewards: Sequence[float], std: str) -> list[float]:
    """Return the standard deviation of the other rewards, of at least two rewards, for each of them; 0 where there is
    one other. std: as in `standard_deviation`."""
    return [standard_deviation([*rewards[:i], *rewards[i + 1 :]], std) for i in range(len(rewards))]


@dataclass
class MovingAverage:
    """The moving average of the mean rewards of earlier steps, without the bias of its start: Σ d^(n−s)·r_s / Σ
    d^(n−s)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The average, 0 before the first step."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, reward: float, decay: float) -> None:
        """Take up the mean reward of a step. decay: d, from 0 (the last step alone counts) to 1 (all count alike)."""
        self.total, self.weight = decay * self.total + reward, decay * self.weight + 1.0
