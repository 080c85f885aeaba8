"""Baselines for the samples in an update, computed by the driver from scalar rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megarl.algorithms.baselines import MovingAverage, Normalization
from megarl.algorithms.specs import GroupEstimator
from megarl.config.algorithm_schema import Advantage
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.step.rollout_rewards import Totals, member_of, reward_from_others, rollouts_of, turns_of_rollout

Groups = Sequence[Sequence[SampleRef]]
"""The samples in one update, by prompt."""


def step_normalization(
    config: Config, groups: Groups, token_reward_totals: Totals, kl_reward_totals: Totals
) -> Normalization | None:
    """Return the normalization over a step, if the estimator has one. `groups` are all groups in the step."""
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    if not isinstance(spec, GroupEstimator):
        return None
    rollouts = [rollouts_of(group) for group in groups]
    totals = token_reward_totals, kl_reward_totals
    members = [[member_of(advantage, items, *totals) for items in group] for group in rollouts]
    return spec.normalization(members, advantage.options())


def attach_baselines(
    config: Config,
    groups: Groups,
    token_reward_totals: Totals,
    kl_reward_totals: Totals,
    average: MovingAverage,
    normalization: Normalization | None = None,
) -> list[SampleRef]:
    """Return all samples in an update with their baselines and the rewards from the other samples of their rollouts.
    The samples in a rollout share its baseline. The totals are sums over the per-token rewards of the implicit reward
    model, and over the KL rewards."""
    advantage, spec = config.algorithm.advantage, config.algorithm.advantage.spec
    earlier, totals = average.value, (token_reward_totals, kl_reward_totals)
    rollouts = [rollouts_of(group) for group in groups]
    members = [[member_of(advantage, items, *totals, earlier) for items in group] for group in rollouts]
    options = advantage.options()
    baselines = [spec.baselines(group, options) for group in members]
    if normalization is not None:
        baselines = [[normalization.apply(baseline) for baseline in group] for group in baselines]
    if isinstance(spec, GroupEstimator) and spec.amplify is not None:
        without_kl = [[member_of(advantage, items, token_reward_totals, {}) for items in group] for group in rollouts]
        factor = spec.amplify(without_kl)
        baselines = [
            [replace(b, scale=b.scale / factor, token_scale=b.token_scale / factor) for b in g] for g in baselines
        ]
    by_turn = _turn_advantages(advantage, rollouts)
    return [
        replace(
            item,
            baseline=baseline,
            turn_advantages=by_turn.get(item.id, ()),
            reward_from_others=reward_from_others(advantage, items, item, *totals),
        )
        for group, compared in zip(rollouts, baselines, strict=True)
        for items, baseline in zip(group, compared, strict=True)
        for item in items
    ]


def _turn_advantages(
    advantage: Advantage, groups: Sequence[Sequence[Sequence[SampleRef]]]
) -> dict[str, tuple[float, ...]]:
    """Return the advantages of each sample's turns, by sample id; empty if the estimator does not compare turns.
    `groups` lists the rollouts of each group."""
    spec, options = advantage.spec, advantage.options()
    if not isinstance(spec, GroupEstimator) or spec.compare_turns is None:
        return {}
    by_turn: dict[tuple[str, int], float] = {}
    for group in groups:
        turns = [turns_of_rollout(rollout) for rollout in group]
        compared = spec.turn_advantages([list(by_key.values()) for by_key in turns], options)
        for by_key, advantages in zip(turns, compared, strict=True):
            by_turn |= zip(by_key, advantages, strict=True)
    samples = [item for group in groups for rollout in group for item in rollout]
    return {item.id: tuple(by_turn[item.id, index] for index in range(len(item.turns))) for item in samples}


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
