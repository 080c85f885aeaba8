"""Building blocks for group estimators: baselines and scales computed from the rewards of one prompt's samples. All
values are plain scalars on the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megarl.core.score import NO_TOTALS, Baseline, RewardPart, TokenTotals


@dataclass(frozen=True, slots=True)
class Member:
    """One sample of a group, as seen by an estimator.

    Attributes:
        reward: the reward of the whole sample.
        num_tokens: the number of trained tokens.
        token_reward_totals: sums over the token rewards, if tokens are compared individually.
        greedy: the reward of a greedy response to the same prompt, if the estimator uses one.
        earlier: the moving average of the mean rewards of earlier steps.
        parts: the rewards by name, if the estimator compares them separately. The remainder of `reward` is the KL in
            the reward, and the token rewards if they are not compared individually.
    """

    reward: float
    num_tokens: int
    token_reward_totals: TokenTotals = NO_TOTALS
    greedy: float = 0.0
    earlier: float = 0.0
    parts: Mapping[str, RewardPart] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: its reward, and a hash of the environment state before the turn."""

    state: int
    reward: float


class Normalization(NamedTuple):
    """Mean and scale of the unscaled advantages reward − center over a step."""

    mean: float
    scale: float

    def apply(self, baseline: Baseline) -> Baseline:
        """Return the baseline of the normalized advantage, (reward − center − mean) / scale."""
        if baseline.scale == math.inf:  # the advantage is 0
            return baseline
        center = baseline.center + self.mean
        return replace(baseline, center=center, scale=self.scale, token_scale=self.scale)


def mean(rewards: Sequence[float]) -> float:
    """Return the mean, clamped to the range of the rewards, so that the mean of equal rewards is exact. Without
    clamping, three rewards of 0.1 would not have the mean 0.1, and dividing by a small standard deviation would amplify
    the error."""
    average = math.fsum(rewards) / len(rewards)
    return min(max(average, min(rewards)), max(rewards))


def group_mean(group: Sequence[Member]) -> list[Baseline]:
    """Return b = mean(r) for each sample of the group."""
    return [Baseline(mean([member.reward for member in group]))] * len(group)


def means_of_others(rewards: Sequence[float]) -> list[float]:
    """Return b_i = Σ_{j≠i} r_j / (n − 1). Requires at least two rewards."""
    return [mean((*rewards[:i], *rewards[i + 1 :])) for i in range(len(rewards))]


def scale_of(deviation: float, std_epsilon: float) -> float:
    """Return the divisor for the advantages. A divisor of 0 is replaced with 1, so equal rewards have advantage 0."""
    return deviation + std_epsilon or 1.0


def standard_deviation(rewards: Sequence[float], std: str) -> float:
    """Return the standard deviation of the rewards. It is exactly 0 for equal rewards, without rounding error.
    std="sample" divides the squared deviations by n − 1, "population" by n."""
    if min(rewards) == max(rewards):
        return 0.0
    average = mean(rewards)
    divisor = len(rewards) - 1 if std == "sample" else len(rewards)
    return math.sqrt(math.fsum((r - average) ** 2 for r in rewards) / divisor)


def deviations_of_others(rewards: Sequence[float], std: str) -> list[float]:
    """Return, for each reward, the standard deviation of the other rewards, or 0 if there is only one other reward.
    Requires at least two rewards. See `standard_deviation` for `std`."""
    return [standard_deviation([*rewards[:i], *rewards[i + 1 :]], std) for i in range(len(rewards))]


@dataclass
class MovingAverage:
    """Bias-corrected moving average of the mean rewards of earlier steps: Σ d^(n−s)·r_s / Σ d^(n−s)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The moving average; 0 before the first step."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, reward: float, decay: float) -> None:
        """Add the mean reward of a step. The decay d ranges from 0 (last step only) to 1 (plain mean of all steps)."""
        self.total, self.weight = decay * self.total + reward, decay * self.weight + 1.0
