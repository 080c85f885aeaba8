"""What each sample of a group (the samples of one prompt) is compared with, from scalars that the driver holds.

advantage = (reward − value) / scale: an estimator of whole samples is nothing but its choice of these two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.algorithms.pass_at_k import against_all, against_without
from megarl.config.schema import Advantage
from megarl.core.types import NO_BASELINE, NO_TOTALS, Baseline, TokenTotals

NO_ADVANTAGE = Baseline(scale=math.inf, token_scale=math.inf)
"""Whatever the rewards of a sample and of its tokens."""


@dataclass(frozen=True, slots=True)
class Member:
    """A sample of a group, as its baseline sees it.

    reward                of the sample as a whole
    num_tokens            trained ones
    token_reward_totals   rewards of single tokens, where each of these is compared by itself
    """

    reward: float
    num_tokens: int
    token_reward_totals: TokenTotals = NO_TOTALS


def group_baselines(config: Advantage, group: Sequence[Member]) -> list[Baseline]:
    """Of an estimator that compares the samples of a group.

    A group of one (the others' rewards failed) has nothing to compare with: its advantage is 0, whatever its tokens
    are rewarded with, or with group_of_one=reward its reward.
    """
    if len(group) == 1:
        return [NO_BASELINE if config.option("group_of_one") == "reward" else NO_ADVANTAGE]
    baselines = _of_rewards(config, group)
    if config.option("credit") == "whole":
        return baselines
    token_reward_totals = [member.token_reward_totals for member in group]
    compared = (
        _leave_one_out_of_tokens(token_reward_totals)
        if config.estimator == "rloo"
        else _of_all_tokens(config, token_reward_totals)
    )
    return [
        replace(baseline, token_value=value, token_scale=scale)
        for baseline, (value, scale) in zip(baselines, compared, strict=True)
    ]


def _of_rewards(config: Advantage, group: Sequence[Member]) -> list[Baseline]:
    rewards, lengths = [member.reward for member in group], [member.num_tokens for member in group]
    match config.estimator:
        case "rloo":
            return [Baseline(value) for value in leave_one_out(rewards)]
        case "opo":
            return [Baseline(length_weighted_mean(rewards, lengths))] * len(group)
        case "pass_at_k":
            baseline = config.option("pass_at_k_baseline")
            # Where rewards failed. Of all samples there is one set, whose best is the same for each of them.
            k = min(config.option("k"), len(rewards) - (baseline == "all"))
            return pass_at_k(rewards, k, baseline, config.option("std"), config.option("std_epsilon"))
        case "grpo":
            deviation = standard_deviation(rewards, config.option("std"))
            return [Baseline(mean(rewards), scale_of(deviation, _epsilon(config)))] * len(group)
        case _:
            return [Baseline(mean(rewards))] * len(group)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """b_i = Σ_{j≠i} r_j / (n − 1): RLOO (arXiv 2402.14740, section 3.2). At least two rewards."""
    return [math.fsum((*rewards[:i], *rewards[i + 1 :])) / (len(rewards) - 1) for i in range(len(rewards))]


def length_weighted_mean(rewards: Sequence[float], lengths: Sequence[int]) -> float:
    """b = Σ l_j·r_j / Σ l_j: OPO's optimal baseline where the squared gradient of a sample grows with its length
    (arXiv 2505.23585, eq. 7). The plain mean if no sample has a token."""
    if not any(lengths):
        return mean(rewards)
    return math.fsum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / sum(lengths)


def pass_at_k(rewards: Sequence[float], k: int, baseline: str, std: str, std_epsilon: float) -> list[Baseline]:
    """The advantage of each sample, written as a baseline of its reward. std: anything but "none" divides by the
    deviation over the sets of k, all of which are known: there is no other one than that of the population."""
    if baseline == "without":
        return [Baseline(r - advantage) for r, advantage in zip(rewards, against_without(rewards, k), strict=True)]
    advantages, deviation = against_all(rewards, k)
    scale = 1.0 if std == "none" else scale_of(deviation, std_epsilon)
    return [Baseline(r - advantage, scale) for r, advantage in zip(rewards, advantages, strict=True)]


def amplification(groups: Sequence[Sequence[Member]]) -> float:
    """α = samples / samples in groups of unequal rewards: GPG's correction for groups without a gradient (arXiv
    2504.02546, section 3.3). 1 where there is none else. Rewards without the KL, which never leaves two of them equal.
    """
    unequal = sum(len(group) for group in groups if _differ(group))
    return sum(map(len, groups)) / unequal if unequal else 1.0


def _differ(group: Sequence[Member]) -> bool:
    """Whether rewards of samples differ, or those of single tokens: n·Σx² = (Σx)², to rounding, where all are equal."""
    token_reward_totals = sum((member.token_reward_totals for member in group), NO_TOTALS)
    of_equal = token_reward_totals.total**2 * (1 + 1e-12)
    return (
        len({member.reward for member in group}) > 1
        or token_reward_totals.count * token_reward_totals.squares > of_equal
    )


def scale_of(deviation: float, std_epsilon: float) -> float:
    """What advantages are divided by; 1 where that were 0: rewards that do not deviate have the advantage 0."""
    return deviation + std_epsilon or 1.0


def mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def standard_deviation(rewards: Sequence[float], std: str) -> float:
    """std: "sample" divides the squared deviations by n − 1, "population" by n; "none" makes it 1. 0 for equal rewards,
    whose mean may differ from them by rounding."""
    if std == "none":
        return 1.0
    if min(rewards) == max(rewards):
        return 0.0
    average = mean(rewards)
    divisor = len(rewards) - 1 if std == "sample" else len(rewards)
    return math.sqrt(math.fsum((r - average) ** 2 for r in rewards) / divisor)


def _leave_one_out_of_tokens(group: Sequence[TokenTotals]) -> list[tuple[float, float]]:
    """The mean over the other samples of the mean of their tokens' rewards: PRIME (arXiv 2502.01456, eq. 5)."""
    means = [totals.total / max(totals.count, 1) for totals in group]
    return [(value, 1.0) for value in leave_one_out(means)]


def _of_all_tokens(config: Advantage, group: Sequence[TokenTotals]) -> list[tuple[float, float]]:
    """The mean over all rewards of the group's tokens; under grpo with their deviation as scale: process supervision
    (arXiv 2402.03300, section 4.1.3)."""
    count = sum(totals.count for totals in group)
    average = math.fsum(totals.total for totals in group) / max(count, 1)
    if config.estimator != "grpo" or config.option("std") == "none":
        return [(average, 1.0)] * len(group)
    squares = math.fsum(totals.squares for totals in group) - count * average**2
    divisor = count - 1 if config.option("std") == "sample" else count
    deviation = math.sqrt(max(squares, 0.0) / divisor) if divisor > 0 else 0.0
    return [(average, scale_of(deviation, _epsilon(config)))] * len(group)


def _epsilon(config: Advantage) -> float:
    return 0.0 if config.option("std") == "none" else config.option("std_epsilon")


@dataclass
class MovingAverage:
    """Of the mean rewards of earlier steps, with the bias of its start taken out: Σ d^(n−s)·r_s / Σ d^(n−s)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """0 before the first step."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, reward: float, decay: float) -> None:
        """After a step. decay: d, from 0 (the last step alone) to below 1."""
        self.total, self.weight = decay * self.total + reward, decay * self.weight + 1.0
