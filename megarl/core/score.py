"""The rewards of a sample, and their baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ENVIRONMENT = "environment"
"""Name of the environment's reward component, and of its feedback."""


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Count, sum and sum of squares of a sample's per-token rewards. Tokens without a reward are not counted. A token
    with rewards from several models is counted once for each."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, rewards: Sequence[float]) -> TokenTotals:
        return cls(len(rewards), math.fsum(rewards), math.fsum(reward * reward for reward in rewards))

    def __add__(self, other: TokenTotals) -> TokenTotals:
        return TokenTotals(self.count + other.count, self.total + other.total, self.squares + other.squares)


NO_TOTALS = TokenTotals()


class RewardPart(NamedTuple):
    """The value of one reward, such as a reward function's, and its weight in the sample's reward."""

    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one sample: either a value, or the reason why it is missing. A failure is not a score of 0.

    Attributes:
        value: weighted sum of the parts; None if any part failed.
        parts: value of each reward function, by name.
        failure: None, or one line that names the reward function and the error.
        is_infrastructure: whether the infrastructure caused the failure, rather than a reward function.
        token_reward_totals: totals of the rewards that are assigned to single tokens.
        turn_rewards: rewards of the sample's turns in an environment, included in the value.
        reward_parts: the rewards that make up the value, by name, without those that are assigned to single tokens.
        issues: problems that a response may cause without a failure, keyed by FUNCTION_PROBLEM: a description, or None
            if the problem did not occur.
    """

    value: float | None
    parts: dict[str, float]
    failure: str | None = None
    token_reward_totals: TokenTotals = NO_TOTALS
    turn_rewards: tuple[float, ...] = ()
    reward_parts: Mapping[str, RewardPart] = field(default_factory=dict)
    is_infrastructure: bool = False
    issues: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Baseline for a sample's reward: advantage = (reward − center) / scale. token_center and token_scale are the
    corresponding values for per-token rewards, each of which is compared separately."""

    center: float = 0.0
    scale: float = 1.0
    token_center: float = 0.0
    token_scale: float = 1.0


NO_BASELINE = Baseline()
