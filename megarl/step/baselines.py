"""Baselines of the samples of an update, from the scalars that the driver knows of their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from megarl.algorithms.baselines import Member, MovingAverage
from megarl.algorithms.specs import GroupEstimator
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.types import NO_TOTALS, Baseline, TokenTotals
from megarl.step.scoring import ScoredSample

Totals = Mapping[str, TokenTotals]
"""Sums over a model's rewards of tokens: sample id -> TokenTotals."""

Groups = Sequence[Sequence[ScoredSample]]
"""The samples of one update, by prompt."""


def attach_baselines(
    config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals, average: MovingAverage
) -> list[ScoredSample]:
    """Returns all samples of an update with their baselines.

    token_reward_totals   sums over an implicit reward model's rewards
    kl_reward_totals      sums over the rewards for being close to the reference
    """
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    earlier = average.value
    members = [
        [_member(config, item, token_reward_totals, kl_reward_totals, earlier) for item in group] for group in groups
    ]
    options = advantage.options()
    baselines = [spec.baselines(group, options) for group in members]
    if isinstance(spec, GroupEstimator) and spec.amplify is not None:
        factor = spec.amplify([[_member(config, item, token_reward_totals, {}) for item in group] for group in groups])
        baselines = [[_amplified(baseline, factor) for baseline in group] for group in baselines]
    return [
        replace(item, baseline=baseline)
        for group, compared in zip(groups, baselines, strict=True)
        for item, baseline in zip(group, compared, strict=True)
    ]


def update_reward_average(
    config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals, average: MovingAverage
) -> dict[str, Metric]:
    """Adds the step's rewards to their moving average, if that is the estimator's baseline, after the baselines of all
    updates are attached. Returns the average as it was before, as a metric."""
    advantage, before = config.algorithm.advantage, average.value
    if advantage.spec.comparison != "moving_average":
        return {}
    mean = fmean(
        _member(config, item, token_reward_totals, kl_reward_totals).reward for group in groups for item in group
    )
    average.add(mean, advantage.option("baseline_decay"))
    return {"reward/baseline": Metric(before)}


def _amplified(baseline: Baseline, factor: float) -> Baseline:
    return replace(baseline, scale=baseline.scale / factor, token_scale=baseline.token_scale / factor)


def _member(
    config: Config, item: ScoredSample, token_reward_totals: Totals, kl_reward_totals: Totals, earlier: float = 0.0
) -> Member:
    """Makes the Member of a sample. Rewards of single tokens are part of the sample's reward, unless they are compared
    by themselves. The KL is always part of it."""
    name, num_tokens = item.sample.info.id, item.sample.info.num_trained_tokens
    learned = token_reward_totals.get(name, NO_TOTALS)
    reward = item.reward + kl_reward_totals.get(name, NO_TOTALS).total
    if config.algorithm.advantage.credits_to_go:
        totals = item.token_reward_totals + learned
        return Member(reward - item.token_reward_totals.total, num_tokens, totals, item.greedy, earlier)
    return Member(reward + learned.total, num_tokens, NO_TOTALS, item.greedy, earlier)
