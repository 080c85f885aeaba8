"""The simulation of a run's steps under a virtual clock: engines and trainers that wait for each other, by the schedule
that real runs have."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megarl.rollout.schedule import RolloutSchedule

DEVIATION = 1.0
"""The standard deviation of the logarithm of a response's length, where lengths are drawn: the longest of 512 is then
12 times as long as the mean, before it is cut off. An assumption."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of engines and trainers.

    replicas         engines
    concurrent       sequences that an engine works on at once; others wait for their turn
    token_seconds    seconds of an engine's step, in which each of so many sequences gets a token
    train_seconds    seconds of all passes and updates of a step
    refit_seconds    seconds in which new weights come, and engines sample nothing
    recompute        seconds in which an engine computes the keys and values of a sequence anew that has so many tokens
                     of its response; None where those of older weights are kept
    """

    replicas: int
    concurrent: int
    token_seconds: Callable[[int], float]
    train_seconds: float
    refit_seconds: float
    recompute: Callable[[float], float] | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """The second half of a simulated run, when the start is over.

    step_seconds   a step's, on average
    engines_idle   the share of the time in which an engine had nothing to do, or waited for weights
    trainers_idle  the share of the time in which the trainers did not train
    mean_age       versions that the weights which began a sample are behind those that train on it
    largest_age    the largest of them
    """

    step_seconds: float
    engines_idle: float
    trainers_idle: float
    mean_age: float
    largest_age: int


@dataclass(slots=True, eq=False)
class _Group:
    """The responses to a prompt: the tokens of each, the version that began them, and those that have not ended."""

    lengths: Sequence[int]
    version: int
    unfinished: int


@dataclass(slots=True)
class _Engine:
    """An engine that gives each of its sequences a token a step. Sequences are known by the step in which they end.

    active       the end of each sequence, its number, the step in which it begins, and its group
    recomputing  seconds until it has the keys and values again that its next steps read
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
        """Seconds until a sequence ends."""
        if not self.active:
            return math.inf
        steps = self.active[0][0] - self.steps
        return self.recomputing + steps * self.speeds.token_seconds(len(self.active))

    def take_weights(self) -> None:
        """Goes on with what is under way."""
        if self.speeds.recompute is not None:
            self.recomputing = sum(self.speeds.recompute(self.steps - begin) for _, _, begin, _ in self.active)

    def advance(self, seconds: float, numbers: Iterator[int]) -> list[_Group]:
        """Samples for so long, at most until the next sequence ends. Returns the groups that have ended."""
        if not self.active:
            return []
        self.busy += seconds
        if seconds >= self.seconds_to_next:
            self.steps, self.recomputing = self.active[0][0], 0.0
        else:
            sampling = max(0.0, seconds - self.recomputing)
            self.recomputing = max(0.0, self.recomputing - seconds)
            self.steps += sampling / self.speeds.token_seconds(len(self.active))
        ended = []
        while self.active and self.active[0][0] <= self.steps:
            *_, group = heapq.heappop(self.active)
            group.unfinished -= 1
            ended += [group] if not group.unfinished else []
        self._fill(numbers)
        return ended


class _Clock:
    """The run: its schedule, and the engines, whose time moves on."""

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
        """Let engines sample for so long."""
        until = self.now + seconds
        while self.now < until:
            self._advance(min(until - self.now, self._seconds_to_next))
        self.now = until

    def sample_until_next(self) -> None:
        """Let engines sample until a sequence ends."""
        assert self._seconds_to_next < math.inf, "the step waits for what nobody samples"
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
    """Return what a run of so many steps comes to. lengths: draws the tokens of each response to the next prompt.
    is_colocated: whether engines pause while the models train, as they do on the same devices."""
    clock = _Clock(speeds, prompts_per_step, max_staleness)
    start, busy, ages = 0.0, 0.0, []
    for version in range(steps):
        if version == steps // 2:
            start, busy, ages = clock.now, clock.busy, []
        # As if more steps followed than do: the end of a run is another matter.
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
    """Return what draws the lengths of a prompt's samples: log-normal ones of this mean, of which what is longer than
    the longest is cut off."""
    source = random.Random(seed)
    location = math.log(mean) - deviation**2 / 2
    return lambda: [max(1, min(longest, round(source.lognormvariate(location, deviation)))) for _ in range(samples)]


def recorded_lengths(lengths: Sequence[int], samples: int, seed: int = 0) -> Callable[[], list[int]]:
    """Return what draws the lengths of a prompt's samples from recorded ones."""
    source = random.Random(seed)
    return lambda: source.choices(lengths, k=samples)
