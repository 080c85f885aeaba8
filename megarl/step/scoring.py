"""The scored samples in a step, which are the samples with a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import fmean, pstdev

from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure, RunFailure, UserError
from megarl.core.metrics import Metric, merge
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.step.rollout_rewards import length_rewards, rollouts_of

Metrics = dict[str, Metric]


def is_informative(group: Sequence[SampleRef]) -> bool:
    """Return whether the outcomes in the group differ, or their parts if the estimator compares these separately. If
    not, only length rewards may differ."""
    return len({(item.outcome, *item.reward_parts.values()) for item in group}) > 1


def select(
    config: Config, groups: Sequence[Sequence[SampleRef]], scores: Sequence[Score]
) -> tuple[list[list[SampleRef]], Metrics]:
    """Combine samples with their scores, by group. The last rollout in a group may be greedy, and is then not trained
    on. Samples are left out and counted if their reward or environment failed, or if the greedy response to their
    prompt has no reward. The run stops if the fraction of reward failures exceeds rewards.failure_limit, with a
    UserError if reward functions alone exceed it, otherwise with an InfrastructureFailure. It also stops after
    rewards.max_consecutive_failures consecutive failures of reward functions. Environment failures do not count, and a
    rollout with several samples counts once."""
    samples = [sample for group in groups for sample in group]
    by_rollout = {sample.rollout_id: (sample, score) for sample, score in zip(samples, scores, strict=True)}
    reward_scores = [score for sample, score in by_rollout.values() if not sample.has_failed]
    failed = [score for score in reward_scores if score.failure is not None]
    at_fault = [score for score in failed if not score.is_infrastructure]
    allowed = Fraction(repr(config.rewards.failure_limit)) * len(by_rollout)  # exact: 0.29 of 100 is 29
    if len(failed) > allowed:
        is_user_error = len(at_fault) > allowed
        first = at_fault[0] if is_user_error else next(score for score in failed if score.is_infrastructure)
        remedy = "correct the reward function" if is_user_error else "restore the service or free memory, then resume"
        raise (UserError if is_user_error else InfrastructureFailure)(
            f"{first.failure} ({len(failed)} of {len(by_rollout)} {_noun(config)} failed, but "
            f"rewards.failure_limit={config.rewards.failure_limit:g} allows only {float(allowed):g}). Fix: {remedy}, "
            "or raise rewards.failure_limit"
        )
    _check_consecutive_failures(config, reward_scores)
    remaining = iter(scores)
    judged = [[(sample, next(remaining)) for sample in group] for group in groups]
    if not config.samples_greedily:
        scored = [_scored(config, group) for group in judged]
        return scored, _reward_metrics(scored, [member for group in judged for member in group])
    sampled = [_without_last_rollout(group) for group in judged]
    greedy_rewards = [_greedy_reward(config, group) for group in judged]
    scored = [
        [] if reward is None else _scored(config, group, reward)
        for group, reward in zip(sampled, greedy_rewards, strict=True)
    ]
    greedy = [reward for reward in greedy_rewards if reward is not None]
    metrics = _reward_metrics(scored, [member for group in sampled for member in group])
    return scored, metrics | {"reward/greedy_mean": Metric(fmean(greedy))}


Judged = tuple[SampleRef, Score]


def _without_last_rollout(group: Sequence[Judged]) -> list[Judged]:
    last = group[-1][0].rollout_id
    return [(sample, score) for sample, score in group if sample.rollout_id != last]


def _check_consecutive_failures(config: Config, scores: Sequence[Score]) -> None:
    limit, failed = config.rewards.max_consecutive_failures, 0
    for score in (score for score in scores if not score.is_infrastructure):
        failed = 0 if score.failure is None else failed + 1
        if failed == limit:
            raise UserError(
                f"{score.failure} (rewards.max_consecutive_failures={limit}: {failed} consecutive {_noun(config)} "
                "failed). Fix: correct the reward function, or raise rewards.max_consecutive_failures"
            )


def _noun(config: Config) -> str:
    return "rollouts" if config.has_environment else "samples"


def _greedy_reward(config: Config, group: Sequence[Judged]) -> float | None:
    last, score = group[-1]
    length_reward = length_rewards(config, [sample for sample, _ in group])[last.rollout_id]
    return None if score.value is None else score.value + length_reward


def _scored(config: Config, members: Sequence[Judged], greedy: float = 0.0) -> list[SampleRef]:
    by_rollout = length_rewards(config, [sample for sample, _ in members])
    separates = config.algorithm.advantage.spec.separates_rewards
    return [
        replace(
            sample,
            outcome=score.value,
            length_reward=by_rollout[sample.rollout_id],
            token_reward_totals=score.token_reward_totals,
            turn_rewards=score.turn_rewards,
            reward_parts=score.reward_parts if separates else {},
            greedy=greedy,
        )
        for sample, score in members
        if score.value is not None
    ]


def _reward_metrics(groups: Sequence[Sequence[SampleRef]], judged: Sequence[Judged]) -> Metrics:
    """Return reward metrics. A rollout with several samples counts once."""
    rewards = [rollout[0].reward for group in groups for rollout in rollouts_of(group)]
    scores = {sample.rollout_id: score for sample, score in judged}.values()
    if not rewards:
        is_lost = all(score.is_infrastructure for score in scores)
        raise (InfrastructureFailure if is_lost else RunFailure)(
            "rewards: megarl could not score any sample of this step. See the failure fields in rollouts/"
        )
    parts = merge({f"reward/{name}": Metric(value) for name, value in score.parts.items()} for score in scores)
    issues = merge(
        {f"reward/{name}_frac": Metric(problem is not None) for name, problem in score.issues.items()}
        for score in scores
    )
    return (
        parts
        | issues
        | {
            "reward/mean": Metric(fmean(rewards)),
            "reward/std": Metric(pstdev(rewards)),
            "reward/failed_frac": Metric(1 - len(rewards) / len(scores)),
            "reward/infrastructure_failed_frac": Metric(fmean(score.is_infrastructure for score in scores)),
            "reward/zero_std_groups": Metric(fmean(not is_informative(group) for group in groups)),
        }
    )
