"""Simulates the steps of a run with a virtual clock.

Engines and trainers wait for each other according to the schedule that real runs use (`rollout/schedule.py`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megarl.rollout.schedule import RolloutSchedule

DEVIATION = 1.0
"""Standard deviation of the logarithm of drawn response lengths. With this value, the longest of 512 responses is about
12 times the mean, before truncation. This value is an assumption."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of engines and trainers.

    Attributes:
        concurrent: maximum number of sequences that an engine processes at once. Additional sequences are queued.
        token_seconds: maps a batch size to the seconds per engine step.
        train_seconds: seconds for all passes and updates in a step.
        refit_seconds: seconds for a refit. Engines do not sample during a refit.
        recompute: maps the number of tokens generated so far to the seconds for recomputing a sequence's KV cache after
            a refit. None if the cache from older weights is kept.
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
        engines_idle: fraction of the time in which an engine was idle or waited for weights.
        trainers_idle: fraction of the time in which the trainers were idle.
        mean_age: mean number of weight versions between the start of a rollout and its use in training.
        largest_age: maximum number of weight versions between the start of a rollout and its use in training.
        dropped: number of prompts whose rollouts were dropped as stale, divided by the number of prompts started.
    """

    step_seconds: float
    engines_idle: float
    trainers_idle: float
    mean_age: float
    largest_age: int
    dropped: float = 0.0


@dataclass(slots=True, eq=False)
class _Group:
    """The rollouts of one prompt: their response lengths, the weight version at their start, and the number of
    unfinished rollouts."""

    lengths: Sequence[int]
    version: int
    unfinished: int


@dataclass(slots=True)
class _Engine:
    """An engine that generates one token per sequence per step.

    Attributes:
        active: a heap with an entry (last step, sequence number, first step, group) for each running sequence.
        waiting: an entry (response length, group) for each queued sequence.
        steps: number of engine steps so far.
        busy: seconds in which the engine had running sequences.
        recomputing: remaining seconds until the KV cache is recomputed.
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
        """Seconds until the next sequence finishes, or infinity if the engine is idle."""
        if not self.active:
            return math.inf
        steps = self.active[0][0] - self.steps
        return self.recomputing + steps * self.speeds.token_seconds(len(self.active))

    def abort(self, groups: Sequence[_Group], numbers: Iterator[int]) -> None:
        """Drop the sequences of these groups."""
        self.active = [sequence for sequence in self.active if sequence[3] not in groups]
        heapq.heapify(self.active)
        self.waiting = [sequence for sequence in self.waiting if sequence[1] not in groups]
        self._fill(numbers)

    def receive_weights(self) -> None:
        """Receive new weights and keep the running sequences."""
        if self.speeds.recompute is not None:
            self.recomputing = sum(self.speeds.recompute(self.steps - first) for _, _, first, _ in self.active)

    def advance(self, seconds: float, numbers: Iterator[int]) -> list[_Group]:
        """Sample for the given time, at most until the next sequence finishes. Return the groups that have finished."""
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
    """The virtual clock of a run, together with the run's schedule and engines."""

    def __init__(self, speeds: Speeds, schedule: RolloutSchedule[_Group]):
        self.schedule = schedule
        self.engines = [_Engine(speeds) for _ in range(speeds.replicas)]
        self.now = 0.0
        self.num_begun = self.num_dropped = self.num_again = 0
        self._numbers = iter(range(2**62))

    def begin(self, number: int, lengths: Callable[[], Sequence[int]], version: int, wanted: int) -> None:
        """Start the rollouts of `number` prompts. Dropped prompts come first, and the step waits for them, as in
        `step/queue.py`."""
        num_waited = min(self.num_again, self.schedule.num_to_wait_for(wanted))
        for i in range(number):
            drawn = lengths()
            group = _Group(drawn, version, len(drawn))
            self.schedule.begin(group, version, is_restart=i < num_waited)
            min(self.engines, key=lambda engine: engine.load).add(group, self._numbers)
        self.num_again = max(0, self.num_again - number)
        self.num_begun += number

    def drop(self, version: int) -> None:
        """Drop the groups that are too old for the step that starts from this version."""
        expired = self.schedule.expire(version)
        for engine in self.engines:
            engine.abort(expired, self._numbers)
        self.num_again += len(expired)
        self.num_dropped += len(expired)

    def sample(self, seconds: float) -> None:
        """Let the engines sample for the given time."""
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
    num_ahead: int | None = None,
    drops: bool = False,
) -> Simulated:
    """Simulate a run.

    Args:
        num_ahead: number of prompts in flight beyond those for the current step, as in RolloutSchedule.
        drops: whether rollouts that become too old are dropped and their prompts restarted. Otherwise, steps wait for
            them.
        lengths: draws the response lengths for the next prompt.
        is_colocated: whether engines pause while the models train, as they do on shared devices.
    """
    clock = _Clock(speeds, RolloutSchedule(prompts_per_step, max_staleness, num_ahead, drops))
    start, busy, ages, begun, dropped = 0.0, 0.0, [], 0, 0
    for version in range(steps):
        if version == steps // 2:
            start, busy, ages, begun, dropped = clock.now, clock.busy, [], clock.num_begun, clock.num_dropped
        # Pass a constant number of remaining steps: near the end of a run, the schedule starts fewer rollouts.
        clock.begin(clock.schedule.num_to_begin(prompts_per_step, steps), lengths, version, prompts_per_step)
        for missing in range(prompts_per_step, 0, -1):
            while (group := clock.schedule.take(version, missing)) is None:
                clock.sample_until_next()
            ages.append(version - group.version)
        clock.drop(version + 1)
        if is_colocated:
            clock.now += speeds.train_seconds
        else:
            clock.sample(speeds.train_seconds)
        clock.now += speeds.refit_seconds
        for engine in clock.engines:
            engine.receive_weights()
    counted = steps - steps // 2
    seconds = (clock.now - start) / counted
    return Simulated(
        step_seconds=seconds,
        engines_idle=1 - (clock.busy - busy) / (counted * seconds * speeds.replicas),
        trainers_idle=1 - speeds.train_seconds / seconds,
        mean_age=sum(ages) / len(ages),
        largest_age=max(ages),
        dropped=(clock.num_dropped - dropped) / max(1, clock.num_begun - begun),
    )


def log_normal_lengths(
    mean: float, longest: int, samples: int, seed: int = 0, deviation: float = DEVIATION
) -> Callable[[], list[int]]:
    """Return a function that draws a prompt's response lengths from a log-normal distribution.

    Args:
        mean: mean length before truncation, in tokens.
        longest: maximum length in tokens. Longer draws are truncated.
    """
    source = random.Random(seed)
    location = math.log(mean) - deviation**2 / 2
    return lambda: [max(1, min(longest, round(source.lognormvariate(location, deviation)))) for _ in range(samples)]


def recorded_lengths(lengths: Sequence[int], samples: int, seed: int = 0) -> Callable[[], list[int]]:
    """Return a function that draws a prompt's response lengths from recorded lengths."""
    source = random.Random(seed)
    return lambda: source.choices(lengths, k=samples)
