"""Simulation of a run's steps under a virtual clock.

Engines and trainers wait for each other according to the schedule of real runs (`rollout/schedule.py`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megarl.rollout.schedule import RolloutSchedule

DEVIATION = 1.0
"""Standard deviation of the logarithm of drawn response lengths. The longest of 512 responses is then about 12 times
the mean, before truncation. An assumption."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of engines and trainers.

    Attributes:
        replicas: number of engines.
        concurrent: sequences that an engine processes at once; others are queued.
        token_seconds: seconds of an engine step, by its batch size.
        train_seconds: seconds of all passes and updates of a step.
        refit_seconds: seconds of a refit, during which engines do not sample.
        recompute: seconds to recompute a sequence's KV cache after a refit, by its response tokens; None if the cache
            of older weights is kept.
    """

    replicas: int
    concurrent: int
    token_seconds: Callable[[int], float]
    train_seconds: float
    refit_seconds: float
    recompute: Callable[[float], float] | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """Statistics of the second half of a simulated run, after warm-up.

    Attributes:
        step_seconds: mean seconds of a step.
        engines_idle: share of the time that an engine had no work or waited for weights.
        trainers_idle: share of the time that the trainers did not train.
        mean_age: mean number of weight versions between the start of a rollout and the training on it.
        largest_age: maximum of that number.
    """

    step_seconds: float
    engines_idle: float
    trainers_idle: float
    mean_age: float
    largest_age: int


@dataclass(slots=True, eq=False)
class _Group:
    """The rollouts of one prompt: their response lengths, their first weight version, and the number of unfinished
    ones."""

    lengths: Sequence[int]
    version: int
    unfinished: int


@dataclass(slots=True)
class _Engine:
    """An engine that generates one token per sequence and step.

    Attributes:
        active: a heap of (last step, number, first step, group) for each running sequence.
        recomputing: seconds left until the KV cache is recomputed.
    """

    speeds: Speeds
    active: list[tuple[float, int, float, _Group]] = field(default_factory=list)
    waiting: list[tuple[int, _Group]] = field(default_factory=list)
    steps: float = 0.0
    busy: float = 0.0
    recomputing: float = 0.0

    @property
    def load(self) -> int:
        return len(self.active) + len(self.waiting)

    def add(self, group: _Group, numbers: Iterator[int]) -> None:
        self.waiting += [(length, group) for length in group.lengths]
        self._fill(numbers)

    def _fill(self, numbers: Iterator[int]) -> None:
        while self.waiting and len(self.active) < self.speeds.concurrent:
            length, group = self.waiting.pop(0)
            heapq.heappush(self.active, (self.steps + length, next(numbers), self.steps, group))

    @property
    def seconds_to_next(self) -> float:
        """Seconds until the next sequence finishes."""
        if not self.active:
            return math.inf
        steps = self.active[0][0] - self.steps
        return self.recomputing + steps * self.speeds.token_seconds(len(self.active))

    def take_weights(self) -> None:
        """Receive new weights and keep the running sequences."""
        if self.speeds.recompute is not None:
            self.recomputing = sum(self.speeds.recompute(self.steps - first) for _, _, first, _ in self.active)

    def advance(self, seconds: float, numbers: Iterator[int]) -> list[_Group]:
        """Sample for this long, at most until the next sequence finishes. Return the groups that have finished."""
        if not self.active:
            return []
        self.busy += seconds
        if seconds >= self.seconds_to_next:
            self.steps, self.recomputing = self.active[0][0], 0.0
        else:
            sampling = max(0.0, seconds - self.recomputing)
            self.recomputing = max(0.0, self.recomputing - seconds)
            self.steps += sampling / self.speeds.token_seconds(len(self.active))
        finished = []
        while self.active and self.active[0][0] <= self.steps:
            *_, group = heapq.heappop(self.active)
            group.unfinished -= 1
            finished += [group] if not group.unfinished else []
        self._fill(numbers)
        return finished


class _Clock:
    """The virtual clock of a run, with its schedule and engines."""

    def __init__(self, speeds: Speeds, per_step: int, max_staleness: int):
        self.schedule: RolloutSchedule[_Group] = RolloutSchedule(per_step, max_staleness)
        self.engines = [_Engine(speeds) for _ in range(speeds.replicas)]
        self.now = 0.0
        self._numbers = iter(range(2**62))

    def begin(self, lengths: Sequence[int], version: int) -> None:
        group = _Group(lengths, version, len(lengths))
        self.schedule.begin(group, version)
        min(self.engines, key=lambda engine: engine.load).add(group, self._numbers)

    def sample(self, seconds: float) -> None:
        """Let the engines sample for this long."""
        until = self.now + seconds
        while self.now < until:
            self._advance(min(until - self.now, self._seconds_to_next))
        self.now = until

    def sample_until_next(self) -> None:
        """Let the engines sample until a sequence finishes."""
        assert self._seconds_to_next < math.inf, "the step waits for a group that no engine samples"
        self._advance(self._seconds_to_next)

    @property
    def _seconds_to_next(self) -> float:
        return min(engine.seconds_to_next for engine in self.engines)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            for group in engine.advance(seconds, self._numbers):
                self.schedule.finish(group)

    @property
    def busy(self) -> float:
        return sum(engine.busy for engine in self.engines)


def simulate(
    speeds: Speeds,
    prompts_per_step: int,
    max_staleness: int,
    lengths: Callable[[], Sequence[int]],
    steps: int = 20,
    is_colocated: bool = False,
) -> Simulated:
    """Simulate a run.

    Args:
        lengths: draws the response lengths of the next prompt.
        steps: number of simulated steps.
        is_colocated: whether engines pause while the models train, as they do on shared devices.
    """
    clock = _Clock(speeds, prompts_per_step, max_staleness)
    start, busy, ages = 0.0, 0.0, []
    for version in range(steps):
        if version == steps // 2:
            start, busy, ages = clock.now, clock.busy, []
        # Claim that more steps follow, so that rollouts do not run dry as they do at the end of a run.
        for _ in range(clock.schedule.num_to_begin(prompts_per_step, steps)):
            clock.begin(lengths(), version)
        for missing in range(prompts_per_step, 0, -1):
            while (group := clock.schedule.take(version, missing)) is None:
                clock.sample_until_next()
            ages.append(version - group.version)
        if is_colocated:
            clock.now += speeds.train_seconds
        else:
            clock.sample(speeds.train_seconds)
        clock.now += speeds.refit_seconds
        for engine in clock.engines:
            engine.take_weights()
    counted = steps - steps // 2
    seconds = (clock.now - start) / counted
    return Simulated(
        step_seconds=seconds,
        engines_idle=1 - (clock.busy - busy) / (counted * seconds * speeds.replicas),
        trainers_idle=1 - speeds.train_seconds / seconds,
        mean_age=sum(ages) / len(ages),
        largest_age=max(ages),
    )


def log_normal_lengths(
    mean: float, longest: int, samples: int, seed: int = 0, deviation: float = DEVIATION
) -> Callable[[], list[int]]:
    """Return a function that draws a prompt's response lengths from a log-normal distribution.

    Args:
        mean: mean of the distribution before truncation.
        longest: maximum length; longer draws are truncated.
        samples: lengths per draw.
    """
    source = random.Random(seed)
    location = math.log(mean) - deviation**2 / 2
    return lambda: [max(1, min(longest, round(source.lognormvariate(location, deviation)))) for _ in range(samples)]


def recorded_lengths(lengths: Sequence[int], samples: int, seed: int = 0) -> Callable[[], list[int]]:
    """Return a function that draws a prompt's response lengths from recorded ones."""
    source = random.Random(seed)
    return lambda: source.choices(lengths, k=samples)
