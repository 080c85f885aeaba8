"""The rollouts that are under way: begun before their step where rollout.max_staleness lets them, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.cluster.groups.engines import RemoteSample
from megarl.cluster.pending import Pending, first
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.data.prompts import PromptSet
from megarl.planning.schedule import RolloutSchedule
from megarl.rollout.engine import SamplingRequest
from megarl.run.resume import RunState
from megarl.step.requests import requests


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rollouts of one prompt that are under way, beside others that are submitted with them.

    row     the prompt's in the data
    order   its place among all groups of the run
    place   its place among those that are submitted together
    """

    row: int
    order: int
    pending: Pending[list[list[RemoteSample]]]
    place: int


@dataclass(slots=True)
class RolloutQueue:
    """The groups of rollouts between their beginning and the step that trains on them.

    The driver's state lists their rows, so that a run that goes on from a checkpoint asks for them again."""

    config: Config
    workers: Workers
    data: PromptSet
    state: RunState
    _schedule: RolloutSchedule[Group] = field(init=False)
    _num_begun: int = field(init=False, default=0)
    _num_in_step: int = field(init=False, default=0)
    _step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._schedule = RolloutSchedule(self.config.batch.prompts_per_step, self.config.rollout.max_staleness)

    def begin(self, number: int, wanted: int) -> None:
        """Begins what may be begun during this step, which takes the `wanted` next groups."""
        if number != self._step:
            self._step, self._num_in_step = number, 0
        rows = self.state.draw(self._schedule.num_to_begin(wanted, self.config.run.steps - number))
        asked = requests(self.config, number, [self.data[row] for row in rows], first=self._num_in_step)
        self._num_in_step += len(rows)
        for together in self._submissions(range(len(rows))):
            pending = self._sample([asked[i] for i in together])
            for place, i in enumerate(together):
                group = Group(rows[i], self._num_begun, pending, place)
                self._num_begun += 1
                self._schedule.begin(group, version=number - 1)

    def take(self, number: int, wanted: int, meanwhile: Callable[[], object]) -> list[list[RemoteSample]]:
        """Waits for groups that this step trains on, and returns their samples, in the order in which they were
        begun."""
        taken: list[Group] = []
        while len(taken) < wanted:
            for group in self._schedule.unfinished:
                if group.pending.advance():
                    self._schedule.finish(group)
            group = self._schedule.take(number - 1, wanted - len(taken))
            if group is None:
                first([group.pending for group in self._schedule.unfinished], meanwhile)
            else:
                taken.append(group)
        taken.sort(key=lambda group: group.order)
        for group in taken:
            self.state.under_way.remove(group.row)
        return [group.pending.result()[group.place] for group in taken]

    def metrics(self) -> dict[str, Metric]:
        if not self.config.rollout.max_staleness:
            return {}
        return {
            "rollout/groups_ahead": Metric(len(self._schedule)),
            "rollout/groups_ahead_finished": Metric(len(self._schedule) - len(self._schedule.unfinished)),
        }

    def _submissions(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Returns which groups are submitted together: all where a step waits for all of them, else each by itself."""
        return [[i] for i in numbers] if self.config.rollout.max_staleness else [numbers]

    def _sample(self, asked: Sequence[Sequence[SamplingRequest]]) -> Pending[list[list[RemoteSample]]]:
        """Submits the sampling of the requests of each prompt: by the engines alone, or in environments. The rewards
        begin with a sample as soon as it is there."""
        workers = self.workers
        source = workers.environments if self.config.has_environment else workers.engines
        return source.generate(asked, workers.rewards.listener)


def describe(config: Config) -> list[str]:
    """Returns lines on the age of the samples that a step trains on, where it has no age to speak of none."""
    ahead, correction = config.rollout.max_staleness, config.algorithm.correction
    if not ahead:
        return []
    lines = [
        f"rollouts: up to {ahead} x {config.batch.prompts_per_step} prompts are begun ahead of the step that trains on "
        f"them, with weights up to {ahead} versions older (rollout.max_staleness={ahead})"
    ]
    if config.algorithm.objective.spec.is_policy_objective and correction.weight is None and correction.mask is None:
        lines.append(
            "megarl: warning: nothing corrects for the weights that sampled, and training on samples of older ones has "
            "been seen to fail without (arXiv 2505.24298); set algorithm.correction.old=trainer and weight=token"
        )
    return lines
