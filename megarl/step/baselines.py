"""Baselines for the samples in an update, computed by the driver from scalar rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.specs import GroupEstimator
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.step.rollout_rewards import Totals, member_of, reward_from_others, rollouts_of

Groups = Sequence[Sequence[SampleRef]]
"""The samples in one update, by prompt."""


def step_scale(config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals) -> float | None:
    """Return the scale of all advantages in a step, if the estimator compares them over the step. `groups` are all
    groups in the step."""
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    if not isinstance(spec, GroupEstimator):
        return None
    rollouts = [rollouts_of(group) for group in groups]
    totals = token_reward_totals, kl_reward_totals
    members = [[member_of(advantage, items, *totals) for items in group] for group in rollouts]
    return spec.scale_over_step(members, advantage.options())


def attach_baselines(
    config: Config,
    groups: Groups,
    token_reward_totals: Totals,
    kl_reward_totals: Totals,
    average: MovingAverage,
    scale: float | None = None,
) -> list[SampleRef]:
    """Return all samples in an update with their baselines and the rewards from the other samples of their rollouts.
    The samples in a rollout share its baseline. The totals are sums over the per-token rewards of the implicit reward
    model, and over the KL rewards. `scale` is the `step_scale`."""
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    earlier, totals = average.value, (token_reward_totals, kl_reward_totals)
    rollouts = [rollouts_of(group) for group in groups]
    members = [[member_of(advantage, items, *totals, earlier) for items in group] for group in rollouts]
    options = advantage.options()
    baselines = [spec.baselines(group, options) for group in members]
    if scale is not None:
        baselines = [[b if b.scale == math.inf else replace(b, scale=scale) for b in group] for group in baselines]
    if isinstance(spec, GroupEstimator) and spec.amplify is not None:
        without_kl = [[member_of(advantage, items, token_reward_totals, {}) for items in group] for group in rollouts]
        factor = spec.amplify(without_kl)
        baselines = [
            [replace(b, scale=b.scale / factor, token_scale=b.token_scale / factor) for b in g] for g in baselines
        ]
    return [
        replace(item, baseline=baseline, reward_from_others=reward_from_others(advantage, items, item, *totals))
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
        member_of(advantage, items, token_reward_totals, kl_reward_totals).reward
        for group in groups
        for items in rollouts_of(group)
    )
    average.add(mean, advantage.option("baseline_decay"))
    return {"reward/baseline": Metric(before)}
