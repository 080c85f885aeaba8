"""Baselines for the samples in an update, computed by the driver from scalar rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from megarl.algorithms.baselines import Member, MovingAverage
from megarl.algorithms.specs import GroupEstimator
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.types import NO_TOTALS, SampleRef, TokenTotals
from megarl.step.scoring import rollouts_of

Totals = Mapping[str, TokenTotals]
"""Sums over the per-token rewards from one model: sample id -> TokenTotals."""

Groups = Sequence[Sequence[SampleRef]]
"""The samples in one update, by prompt."""


def attach_baselines(
    config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals, average: MovingAverage
) -> list[SampleRef]:
    """Return all samples in an update with their baselines. The samples in a rollout share its baseline. The totals are
    sums over per-token rewards: those of the implicit reward model, and KL rewards."""
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    earlier = average.value
    rollouts = [rollouts_of(group) for group in groups]
    members = [
        [_member(config, items, token_reward_totals, kl_reward_totals, earlier) for items in group]
        for group in rollouts
    ]
    options = advantage.options()
    baselines = [spec.baselines(group, options) for group in members]
    if isinstance(spec, GroupEstimator) and spec.amplify is not None:
        without_kl = [[_member(config, items, token_reward_totals, {}) for items in group] for group in rollouts]
        factor = spec.amplify(without_kl)
        baselines = [
            [replace(b, scale=b.scale / factor, token_scale=b.token_scale / factor) for b in g] for g in baselines
        ]
    return [
        replace(item, baseline=baseline)
        for group, compared in zip(rollouts, baselines, strict=True)
        for items, baseline in zip(group, compared, strict=True)
        for item in items
    ]


def update_reward_average(
    config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals, average: MovingAverage
) -> dict[str, Metric]:
    """Add the step's mean reward to the moving average, if the estimator uses it as the baseline. Call this after
    baselines are attached in all updates. Return the previous average as a metric."""
    advantage, before = config.algorithm.advantage, average.value
    if advantage.spec.comparison != "moving_average":
        return {}
    mean = fmean(
        _member(config, items, token_reward_totals, kl_reward_totals).reward
        for group in groups
        for items in rollouts_of(group)
    )
    average.add(mean, advantage.option("baseline_decay"))
    return {"reward/baseline": Metric(before)}


def _member(
    config: Config,
    rollout: Sequence[SampleRef],
    token_reward_totals: Totals,
    kl_reward_totals: Totals,
    earlier: float = 0.0,
) -> Member:
    """Return the Member for a rollout, given its samples. Its reward includes the KL reward and, unless the estimator
    compares per-token rewards separately, the per-token rewards."""
    item, names = rollout[0], [item.id for item in rollout]
    num_tokens = sum(item.num_trained_tokens for item in rollout)
    learned = sum((token_reward_totals.get(name, NO_TOTALS) for name in names), NO_TOTALS)
    reward = item.reward + sum(kl_reward_totals.get(name, NO_TOTALS).total for name in names)
    if config.algorithm.advantage.credits_to_go:
        token_totals = sum((item.token_reward_totals for item in rollout), NO_TOTALS)
        return Member(reward - token_totals.total, num_tokens, token_totals + learned, item.greedy, earlier)
    return Member(reward + learned.total, num_tokens, NO_TOTALS, item.greedy, earlier)
