"""Dispatch of a step's samples: assignment to data-parallel ranks, and weights in the loss."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.algorithms.aggregation import imitation_weights, sample_weights
from megarl.cluster.rank_batch import RankBatch, Scores
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.row_batch import PARTIAL_SCORES
from megarl.core.sample import SampleRef
from megarl.data.packing import Packing

Group = Sequence[SampleRef]
"""The scored samples for one prompt."""


def updates_of(config: Config, groups: Sequence[Group]) -> list[list[Group]]:
    """Split the groups into updates. Omit groups whose samples all failed, and updates without groups."""
    size = config.batch.prompts_per_update
    updates = [[group for group in groups[i : i + size] if group] for i in range(0, len(groups), size)]
    return [update for update in updates if update]


def epochs_of(config: Config, groups: Sequence[Group], step: int) -> list[list[list[Group]]]:
    """Return, for each epoch, the groups of each update, split as in `updates_of`. The first epoch keeps the order of
    the groups. Later epochs shuffle them with a seed derived from run.seed, the step and the epoch. The groups within
    an update keep their order, so if an epoch is a single update, all epochs are identical."""
    orders = [range(len(groups)), *(_drawn(config, len(groups), step, n) for n in range(1, config.batch.epochs))]
    return [updates_of(config, [groups[i] for i in order]) for order in orders]


def _drawn(config: Config, num_groups: int, step: int, epoch: int) -> list[int]:
    """Return the shuffled indices of the groups for each update."""
    drawn = random.Random(f"{config.run.seed}.{step}.{epoch}").sample(range(num_groups), num_groups)
    size = config.batch.prompts_per_update
    return [i for begin in range(0, num_groups, size) for i in sorted(drawn[begin : begin + size])]


def samples_of(update: Sequence[Group]) -> list[SampleRef]:
    return [sample for group in update for sample in group]


def dispatch(
    config: Config,
    samples: Sequence[SampleRef],
    packing: Packing,
    role: Role = "actor",
    scores: Mapping[str, Scores] | None = None,
) -> list[RankBatch]:
    """Return each data-parallel rank's batch for one update: its samples, with their weights in the loss, and its
    microbatches. The denoising steps of an image are dispatched separately. For pairwise objectives, the samples of a
    pair must be adjacent, with the better one first. A pair is never split. `scores` are token scores from other
    models, keyed by their names in TokenBatch, or teacher/NAME; those in PARTIAL_SCORES may lack some samples. If they
    include process_reward, subtract these rewards from the sample's scalar reward, because it includes them."""
    objective = config.algorithm.objective
    num_tokens = [_counted_tokens(config, role, sample) for sample in samples]
    prompts = [sample.group for sample in samples]
    empty_samples = objective.empty_samples if role == "actor" else "include"
    longest = config.rollout.max_new_tokens
    weights = sample_weights(_aggregation(config, role), num_tokens, prompts, longest, empty_samples)
    imitation = imitation_weights(num_tokens, [item.outcome for item in samples], objective.imitation_above)
    scores = scores or {}
    dispatched = [
        replace(
            item,
            scalar_reward=_reward(item, role, process="process_reward" in scores),
            weight=weight,
            imitation_weight=imitation_weight,
            scores={
                name: by_sample[item.id]
                for name, by_sample in scores.items()
                if item.id in by_sample or not name.startswith(PARTIAL_SCORES)
            },
        )
        for item, weight, imitation_weight in zip(samples, weights, imitation, strict=True)
    ]
    if config.samples_images:
        steps = ((item, step) for item in dispatched for step in range(item.num_trained_tokens))
        dispatched = [replace(item, step=step, pictured=None) for item, step in steps]
    is_pairwise = role == "actor" and objective.spec.is_pairwise
    pairs = [(index, index + 1) for index in range(0, len(samples), 2)] if is_pairwise else None
    return RankBatch.split(dispatched, packing, pairs)


def _reward(item: SampleRef, role: Role, process: bool) -> float:
    """Return the sample's scalar reward. process: whether its per-token rewards are dispatched separately."""
    if role == "implicit_reward":
        return item.outcome
    reward = item.reward + item.reward_from_others
    return reward - item.token_reward_totals.total if process else reward


def _counted_tokens(config: Config, role: Role, sample: SampleRef) -> int:
    """Return the number of tokens in the sample that count in the loss."""
    skipped = role == "actor" and config.algorithm.objective.skip_truncated and sample.finish_reason == "length"
    return 0 if skipped else sample.num_trained_tokens


def _aggregation(config: Config, role: Role) -> str:
    """Return the loss aggregation for a role. A loss on whole samples or pairs is averaged over them."""
    sample_mean = "sequence_mean_of_token_sums"
    objective = config.algorithm.objective
    return {
        "actor": sample_mean if objective.spec.is_pairwise else objective.aggregation,
        "critic": config.algorithm.value.aggregation,
        "implicit_reward": sample_mean,
    }[role]
