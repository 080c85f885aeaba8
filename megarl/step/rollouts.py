"""Collection of a step's rollouts: sampling and scoring, in additional rounds while too few prompts are informative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import fmean

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.rank_batch import Scores
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.core.timing import Stopwatch
from megarl.step.queue import RolloutQueue
from megarl.step.record import Record, step_record
from megarl.step.rollout_rewards import rollouts_of
from megarl.step.scoring import Metrics, is_informative, select

Advantages = tuple[Mapping[str, float], Mapping[str, Mapping[str, list[float]]]]
"""Mean advantage of each trained sample over its trained tokens, by sample id, and per-token details of a few samples,
by sample id and name."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts in a step.

    Attributes:
        sampled: all samples, by prompt.
        chosen: the samples that the step trains on, by prompt.
        process_rewards: references to per-token rewards; empty without any.
        feedback: references to prompts with feedback on the samples, int32 [P], by teacher and sample id.
        solve_rates: fraction of solved rollouts, by prompt id, for prompts with a scored sample.
        record: the step's record in the sample ledger.
    """

    sampled: Sequence[Sequence[SampleRef]]
    chosen: Sequence[Sequence[SampleRef]]
    process_rewards: Scores
    metrics: Metrics
    solve_rates: Mapping[str, float] = field(default_factory=dict)
    record: Record = field(default_factory=dict)
    feedback: Mapping[str, Scores] = field(default_factory=dict)


def collect_rollouts(
    config: Config,
    workers: Workers,
    number: int,
    queue: RolloutQueue,
    file: Path,
    watch: Stopwatch,
    meanwhile: Callable[[], None],
) -> Rollouts:
    """Collect rollouts for prompts_per_step prompts, and for additional prompts to replace uninformative ones, until
    enough prompts are informative or batch.sampling_rounds have passed. This is DAPO's dynamic sampling
    (https://arxiv.org/abs/2503.14476, eq. 11). The metrics cover all collected rollouts.

    With rollout.max_staleness, rollouts for later steps continue until the devices switch to training, or throughout
    the step if devices are not shared. Stale rollouts are dropped. The devices switch only once for all rounds, because
    no trained model computes between rounds."""
    wanted = config.batch.prompts_per_step
    sampled: list[list[SampleRef]] = []
    scores: list[Score] = []
    process_rewards: Scores = {}
    rounds = num_informative = 0
    with watch.phase("rollout"):
        offloaded = workers.switch_to_rollout()
    while True:
        further = further_prompts(wanted - num_informative, num_informative, len(sampled), wanted)
        with watch.phase("rollout"):
            if rounds:
                workers.resume_sampling()
            queue.begin(number, further)
            groups = queue.take(number, further, meanwhile)
            if workers.rewards_share_devices:  # the engines sleep while rewards are computed
                queue.drop(number)
            workers.switch_to_scoring(is_last=rounds + 1 == config.batch.sampling_rounds)
        with watch.phase("reward"):
            samples = [sample for group in groups for sample in group]
            round_scores, token_rewards = workers.rewards.score(samples, number, file).result(meanwhile)
        sampled += groups
        scores += round_scores
        process_rewards |= token_rewards
        scored, metrics = select(config, sampled, scores)
        rounds, num_informative = rounds + 1, sum(map(is_informative, scored))
        if num_informative >= wanted or rounds == config.batch.sampling_rounds:
            break
    with watch.phase("rollout"):
        queue.drop(number)
        workers.switch_to_training()
    metrics |= offloaded | {"rollout/rounds": Metric(rounds), "rollout/prompts": Metric(len(sampled))}
    metrics |= queue.metrics()
    chosen = choose(scored, wanted)
    record = step_record(queue.take_draws(), sampled, scores, scored, chosen)
    feedback = workers.rewards.take_feedback().result() if config.teachers_see_feedback else {}
    return Rollouts(sampled, chosen, process_rewards, metrics, solve_rates(config, scored), record, feedback)


def solve_rates(config: Config, groups: Sequence[Sequence[SampleRef]]) -> dict[str, float]:
    """Return the fraction of rollouts with an outcome above data.solved_above, by prompt id, for scored prompts. A step
    may have several groups for a prompt, if it draws the prompt more than once."""
    solved: dict[str, list[bool]] = {}
    for first, *_ in (rollout for group in groups for rollout in rollouts_of(group)):
        solved.setdefault(first.prompt_id, []).append(first.outcome > config.data.solved_above)
    return {prompt: fmean(flags) for prompt, flags in solved.items()}


def take_advantages(actor: TrainerGroup) -> Advantages:
    """Return the trained samples' advantages and token details from the ranks, and discard them there."""
    advantages, details = actor.take_advantages(), actor.take_token_details()
    return advantages.result(), details.result()


def further_prompts(missing: int, num_informative: int, num_sampled: int, limit: int) -> int:
    """Return the number of prompts to sample so that `missing` of them are expected to be informative, given the
    fraction of informative prompts so far. The number is at most `limit`."""
    return min(limit, ceil(missing * max(num_sampled, 1) / max(num_informative, 1)))


def choose(groups: Sequence[Sequence[SampleRef]], wanted: int) -> list[Sequence[SampleRef]]:
    """Return the first `wanted` informative groups. If there are too few, add uninformative groups and, last, groups
    without a scored sample. Groups keep their order."""
    by_worth = sorted(range(len(groups)), key=lambda i: (not is_informative(groups[i]), not groups[i]))
    return [groups[i] for i in sorted(by_worth[:wanted])]
