"""The queue of pending rollouts. With rollout.max_staleness, rollouts start before the step that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from megarl.cluster.groups.engines import GroupRequests, Sampled
from megarl.cluster.image_files import attach_images, put_images
from megarl.cluster.pending import Pending, first, ready
from megarl.cluster.rank_batch import put_sample
from megarl.cluster.workers import Workers
from megarl.config.continuation import allowed_changes
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT, Checkpoint, FileRecord
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.data.prompts import PromptSet
from megarl.rollout.router import Aborted, completed
from megarl.rollout.schedule import RolloutSchedule
from megarl.step.finished import FinishedRollouts
from megarl.step.given import given_sample, is_given
from megarl.step.requests import requests
from megarl.step.state import PendingPrompt, RunState

WAITING = "rollouts/waiting.safetensors"
"""File in a checkpoint with the samples that wait for a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The pending rollouts for one prompt.

    Attributes:
        item: the prompt's row in the data, and the weight version at the start of its rollouts.
        prompt: the prompt with references to its images.
        order: position among all groups in this attempt.
        place: position among the groups that were submitted together, and in the result of `pending`.
    """

    item: PendingPrompt
    prompt: Prompt
    order: int
    names: Sequence[str]
    pending: Pending[list[Sampled]]
    place: int = 0

    def result(self) -> Sampled:
        """Wait for the group's rollouts and return them."""
        return self.pending.result()[self.place]


@dataclass(slots=True)
class Dropped:
    """Numbers of samples and tokens in dropped stale rollouts: in total, and in the rollouts that were aborted before
    they finished."""

    samples: int = 0
    tokens: int = 0
    aborted_samples: int = 0
    aborted_tokens: int = 0

    def add(self, sampled: Sampled, num_requested: int) -> None:
        if isinstance(sampled, Aborted):
            self.samples += num_requested
            self.tokens += sampled.num_tokens
            self.aborted_samples += num_requested
            self.aborted_tokens += sampled.num_tokens
        else:
            self.samples += len(sampled)
            self.tokens += sum(sample.num_trained_tokens for sample in sampled)

    def metrics(self) -> dict[str, Metric]:
        return {
            "rollout/dropped_samples": Metric(self.samples),
            "rollout/dropped_tokens": Metric(self.tokens),
            "rollout/aborted_samples": Metric(self.aborted_samples),
            "rollout/aborted_tokens": Metric(self.aborted_tokens),
        }


@dataclass(slots=True)
class Draws:
    """Rows that a step drew, took and dropped.

    Attributes:
        rows: the newly drawn rows, in order.
        taken: the rows of the groups that the step took, in the order in which `take` returned them.
        dropped: the rows whose rollouts were too stale, each with its number of samples and whether its rollouts were
            aborted. They restart.
    """

    rows: list[int] = field(default_factory=list)
    taken: list[PendingPrompt] = field(default_factory=list)
    dropped: list[tuple[PendingPrompt, int, bool]] = field(default_factory=list)


@dataclass(slots=True)
class RolloutQueue:
    """Holds groups from the start of their rollouts until the step that trains on them.

    Consumes: rows of the data, in the order of the driver's state.
    Waits for: finished groups in `take`, and aborted groups in `drop`.
    Unblocked by: the router, whose submissions end with samples or Aborted.

    The driver's state lists the groups' rows. A resumed run samples these prompts again, except for finished groups,
    whose samples are in the checkpoint or in files that are written as groups finish."""

    config: Config
    workers: Workers
    data: PromptSet
    state: RunState
    finished: FinishedRollouts
    _schedule: RolloutSchedule[Group] = field(init=False)
    _num_begun: int = field(init=False, default=0)
    _num_in_step: int = field(init=False, default=0)
    _step: int = field(init=False, default=0)
    _dropped: Dropped = field(init=False, default_factory=Dropped)
    _draws: Draws = field(init=False, default_factory=Draws)

    def __post_init__(self) -> None:
        config = self.config
        self._schedule = RolloutSchedule(
            config.batch.prompts_per_step, config.rollout.max_staleness, config.prompts_ahead, config.drops_rollouts
        )

    def begin(self, number: int, wanted: int) -> None:
        """Start the groups that may start during this step. `wanted` is the number of groups that the step still takes.
        Prompts with dropped rollouts come first, and the step waits for them."""
        if number != self._step:
            self._step, self._num_in_step = number, 0
        num_again, num_earlier = min(len(self.state.again), self._schedule.num_to_wait_for(wanted)), len(self._schedule)
        num_draws = self.state.num_draws
        items = self.state.draw(self._schedule.num_to_begin(wanted, self.config.run.steps - number), number - 1)
        self._draws.rows += [item.row for item in items if item.draw >= num_draws]
        given = {i for i, item in enumerate(items) if is_given(self.config, item)}
        new = [
            i
            for i, item in enumerate(items)
            if i in given or not self._use_finished(item, number, i, is_restart=i < num_again)
        ]
        places = self.finished.free_places(number, self._num_in_step, len(new))
        prompts = put_images([self.data[items[i].row] for i in new], self.data.images)
        group_requests = requests(self.config, number, prompts, places, self.data.responses)
        self._num_in_step = max(self._num_in_step + len(items), 1 + max(places, default=-1))
        groups: dict[int, Group] = {}
        sampled = [k for k in self._in_order([items[i] for i in new]) if new[k] not in given]
        for submission in self._submissions(sampled):
            pending = self._sample([group_requests[k] for k in submission])
            for place, k in enumerate(submission):
                names = [request.sample_id for request in group_requests[k]]
                groups[new[k]] = Group(items[new[k]], prompts[k], self._num_begun + new[k], names, pending, place)
        for i, prompt, (first_request, *_) in zip(new, prompts, group_requests, strict=True):
            if i in given:
                name, _, _ = first_request.sample_id.rpartition(".")
                groups[i] = self._given_group(items[i], prompt, self._num_begun + i, name, number - 1)
        for i in new:
            since, is_restart = items[i].version, i < num_again
            self._schedule.begin(groups[i], number - 1, since, is_restart, index=num_earlier + i)
        self._num_begun += len(items)

    def _given_group(self, item: PendingPrompt, prompt: Prompt, order: int, name: str, version: int) -> Group:
        """Return the group STEP.GROUP of a prompt's given response."""
        response = self.data.responses[prompt.id]
        sample = put_sample(given_sample(name, self.data[item.row], response, version))
        sampled: list[Sampled] = [[sample]]
        return Group(item, prompt, order, [sample.id], ready(sampled))

    def _use_finished(self, item: PendingPrompt, number: int, i: int, is_restart: bool) -> bool:
        """Return whether an earlier attempt has finished this prompt's rollouts, and a step can still train on them. If
        so, add them to the schedule. i: position among the prompts that start now."""
        if not self._schedule.has_room(item.version, number - 1):
            return False
        samples = self.finished.take(item, self.data[item.row].id, f"{number}.{self._num_in_step + i}")
        if samples is None:
            return False
        self._add_finished(item, self._num_begun + i, samples, is_restart)
        return True

    def _add_finished(
        self, item: PendingPrompt, order: int, samples: Sequence[SampleRef], is_restart: bool = False
    ) -> None:
        """Add a group whose rollouts finished in an earlier attempt."""
        sampled: list[Sampled] = [list(samples)]
        [prompt] = put_images([self.data[item.row]], self.data.images)
        group = Group(item, prompt, order, list(dict.fromkeys(sample.rollout_id for sample in samples)), ready(sampled))
        self._schedule.begin(group, item.version, is_restart=is_restart)
        self._schedule.finish(group)

    def take(self, number: int, wanted: int, meanwhile: Callable[[], object]) -> list[list[SampleRef]]:
        """Wait for the groups that this step trains on. Return their samples in the order in which the groups
        started."""
        taken: list[Group] = []
        while len(taken) < wanted:
            self._note_finished()
            group = self._schedule.take(number - 1, wanted - len(taken))
            if group is None:
                awaited = self._schedule.awaited(number - 1, wanted - len(taken))
                self.workers.engines.router.reassign_stragglers([group.names for group in awaited])
                first([group.pending for group in self._schedule.unfinished], meanwhile)
            else:
                taken.append(group)
        taken.sort(key=lambda group: group.order)
        for group in taken:
            self.state.under_way.remove(group.item)
        self._draws.taken += [group.item for group in taken]
        sampled = [[attach_images(sample, group.prompt) for sample in completed(group.result())] for group in taken]
        if self.config.rollout.longest_first:
            lengths: dict[int, list[int]] = {}
            for group, samples in zip(taken, sampled, strict=True):
                found = [sample.num_response_tokens for sample in samples if not sample.is_given]
                lengths.setdefault(group.item.row, []).extend(found)
            self.state.lengths |= {row: fmean(counts) for row, counts in lengths.items() if counts}
        return sampled

    def drop(self, number: int) -> None:
        """Abort the rollouts that are too old for the next step. Their prompts restart before new ones."""
        expired = self._schedule.expire(number)
        if not expired:
            return
        self.workers.engines.router.abort([group.names for group in expired if not group.pending.advance()])
        for group in expired:
            sampled = group.result()
            self._dropped.add(sampled, len(group.names))
            is_aborted = isinstance(sampled, Aborted)
            self._draws.dropped.append((group.item, len(group.names) if is_aborted else len(sampled), is_aborted))
        self.workers.rewards.forget([name for group in expired for name in group.names])
        self.state.put_back([group.item for group in expired], number)

    def save(self, folder: Path) -> list[FileRecord]:
        """Write the samples of finished groups to a file in the checkpoint's folder. Return the file's record, or an
        empty list if no group has finished. Groups that finish later are written as they finish."""
        self.finished.begin(self.state.step)
        self._note_finished()
        finished = self._schedule.finished
        groups = [(group.item.row, group.item.version, completed(group.result())) for group in finished]
        return [self.workers.rewards.save_groups(groups, folder / WAITING)] if groups else []

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the groups that waited when the checkpoint was saved, if later steps may train on them. If the
        checkpoint has a different format, or keys in run.allow_changes have changed, their prompts are sampled
        again."""
        records = [record for record in checkpoint.files if record.path == WAITING]
        if not records or checkpoint.format != FORMAT or allowed_changes(self.config, checkpoint.state["config"]):
            return
        checkpoint.verify(records)
        for row, version, samples in self.workers.rewards.load_groups(checkpoint.path / WAITING):
            if self._schedule.has_room(version, self.state.step):
                self._add_finished(self.state.take_up(row, version), self._num_begun, samples)
                self._num_begun += 1

    def _note_finished(self) -> None:
        for group in self._schedule.unfinished:
            if group.pending.advance():
                self._schedule.finish(group)

    def metrics(self) -> dict[str, Metric]:
        """Return the queue's metrics for a step that has taken its groups."""
        metrics: dict[str, Metric] = {}
        if self.config.rollout.max_staleness:
            metrics["rollout/groups_ahead"] = Metric(len(self._schedule))
            metrics["rollout/groups_ahead_finished"] = Metric(len(self._schedule) - len(self._schedule.unfinished))
        if self.config.drops_rollouts:
            metrics |= self._dropped.metrics()
            self._dropped = Dropped()
        return metrics

    def take_draws(self) -> Draws:
        """Return the rows that were drawn, taken and dropped since the last call."""
        draws, self._draws = self._draws, Draws()
        return draws

    def _in_order(self, items: Sequence[PendingPrompt]) -> list[int]:
        """Return the positions of the rows in the order of submission."""
        places, lengths = list(range(len(items))), self.state.lengths
        if not self.config.rollout.longest_first or not lengths:
            return places
        unknown = fmean(lengths.values())
        return sorted(places, key=lambda i: -lengths.get(items[i].row, unknown))

    def _submissions(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Split the groups into submissions: a single one if a step waits for all groups, otherwise one per group."""
        if self.config.prompts_ahead:
            return [[i] for i in numbers]
        return [numbers] if numbers else []

    def _sample(self, groups: GroupRequests) -> Pending[list[Sampled]]:
        """Submit the requests for each prompt. Rewards are computed for each sample as soon as it is finished."""
        workers = self.workers
        source = workers.engines if workers.environments is None else workers.environments
        return source.generate(groups, workers.rewards.listener)


def describe(config: Config) -> list[str]:
    """Return log lines about the staleness of training samples; empty if they are never stale."""
    if config.is_offline:
        return []
    staleness, correction, ahead = config.rollout.max_staleness, config.algorithm.correction, config.prompts_ahead
    lines = []
    if staleness and ahead:
        lines.append(
            f"rollouts: the engines sample up to {ahead} prompts ahead of the training step, with weights that are up "
            f"to {staleness} versions older (rollout.max_staleness={staleness})"
        )
    if config.pauses_rollouts:
        lines.append("rollouts: the engines pause unfinished rollouts during training (cluster.placement=colocated)")
    if config.drops_rollouts:
        lines.append(
            f"rollouts: each step starts {ahead} more prompts than the {config.batch.prompts_per_step} that it trains "
            f"on, and trains on the prompts that finish first. megarl drops rollouts that are more than {staleness} "
            "versions old, restarts their prompts, and waits for these prompts (rollout.on_stale=drop)"
        )
        lines.append(
            "megarl: note: megarl drops long responses more often than short ones. Training still uses each prompt "
            "equally often, but with fewer long responses. The metric rollout/dropped_tokens counts the dropped tokens"
        )
    uncorrected = correction.weight is None and correction.mask is None
    if staleness and config.algorithm.objective.spec.is_policy_objective and uncorrected:
        lines.append(
            f"megarl: warning: rollout.max_staleness={staleness}: training on stale samples can diverge without "
            "a correction (arXiv 2505.24298). Fix: set algorithm.correction.old=trainer and "
            "algorithm.correction.weight=token"
        )
    return lines
