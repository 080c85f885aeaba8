"""Which samples of a step are learned from: those that the rewards could judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from megarl.algorithms.groups import group_statistics
from megarl.batch import GroupStatistics, Score
from megarl.cluster.engine_group import RemoteSample
from megarl.cluster.failure import RunFailure
from megarl.config.schema import Config
from megarl.metrics import Metric, merge

Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample that the rewards have judged, its reward, and its group's statistics.

    of_tokens   how much of the reward is the sum of those that its tokens have one by one
    """

    sample: RemoteSample
    reward: float
    group: GroupStatistics
    of_tokens: float = 0.0


def select(
    config: Config, groups: Sequence[Sequence[RemoteSample]], scores: Sequence[Score]
) -> tuple[list[list[ScoredSample]], Metrics]:
    """Joins samples with their scores, by group. A sample whose reward failed is left out, and counted; above
    rewards.failure_limit the run stops."""
    failures = [score.failure for score in scores if score.failure is not None]
    if len(failures) > config.rewards.failure_limit * len(scores):
        raise ValueError(
            f"{failures[0]} ({len(failures)} of {len(scores)} samples failed; rewards.failure_limit="
            f"{config.rewards.failure_limit:g} allows {config.rewards.failure_limit * len(scores):g})"
        )
    remaining = iter(scores)
    scored = [_scored_group(config, [(sample, next(remaining)) for sample in group]) for group in groups]
    return scored, _reward_metrics(scored, scores)


def _scored_group(config: Config, members: Sequence[tuple[RemoteSample, Score]]) -> list[ScoredSample]:
    judged = [(sample, score.value, score.of_tokens) for sample, score in members if score.value is not None]
    if not judged:
        return []
    statistics = group_statistics([reward for _, reward, _ in judged], config.algorithm.advantage.std)
    return [ScoredSample(sample, reward, statistics, of_tokens) for sample, reward, of_tokens in judged]


def _reward_metrics(groups: Sequence[Sequence[ScoredSample]], scores: Sequence[Score]) -> Metrics:
    rewards = [item.reward for group in groups for item in group]
    if not rewards:
        raise RunFailure("rewards: no sample of this step could be scored; see the rollouts' failure fields")
    parts = merge({f"reward/{name}": Metric(value) for name, value in score.parts.items()} for score in scores)
    uniform = [len({item.reward for item in group}) <= 1 for group in groups]
    return parts | {
        "reward/mean": Metric(fmean(rewards)),
        "reward/std": Metric(pstdev(rewards)),
        "reward/failed_share": Metric(1 - len(rewards) / len(scores)),
        "reward/zero_std_groups": Metric(fmean(uniform)),
    }
