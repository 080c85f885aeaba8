"""Routes rollouts to engines: placement, load, measured speed, stragglers, losses and aborts.

The router handles single responses and rollouts in environments. It refers to engines and rollouts only by name. Its
callers start the rollouts and pass their samples back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

T = TypeVar("T")

SLOW = 1.5
"""Slowdown relative to the fastest engine above which an engine receives fewer requests. Lower values are noise."""

MUCH_SLOWER = 2.0
"""Slowdown relative to the fastest engine above which idle engines restart a slow engine's prompts. At twice the time
per token, an idle engine finishes the same work from scratch before the slow engine does."""

RESTARTS = 3
"""Maximum number of restarts per engine. If an engine fails again after that, the cause is probably permanent."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Result of an aborted group. `num_tokens` is the number of tokens that it had sampled."""

    num_tokens: int


def completed(results: list[T] | Aborted) -> list[T]:
    """Return the results of a group that cannot have been aborted, because its caller is waiting for it."""
    assert not isinstance(results, Aborted), "the group was aborted while its caller was waiting for it"
    return results


Abort = Callable[[str, Collection[str]], object]
"""Function (engine, groups) that aborts the groups on the engine. A group is named after its first rollout."""


class Router:
    """Assigns groups to engines. The rollouts for one prompt all run on one engine, where they share a prefix cache.

    Consumes: submissions of groups. Waits for: nothing; its callers wait for the engines, and pass the samples to
    Submission.collect. Unblocked by: samples, losses and aborts. A submission is then done, or is placed again.
    """

    def __init__(self, engines: Sequence[str], weighs_speed: bool):
        """Create a router for engines with these names. `weighs_speed`: whether slower engines receive fewer requests.
        It must be False if a step waits for all of its rollouts; otherwise, the run would not be reproducible."""
        self.engines, self.live = tuple(engines), list(engines)
        self._weighs_speed = weighs_speed
        self.losses: Counter[str] = Counter()
        """Number of processes that each engine has lost."""
        self.load: Counter[str] = Counter()
        """Number of unfinished requests of each engine."""
        self._latencies: dict[str, float] = {}
        """Seconds per token for each engine, as an exponential moving average over measurements."""
        self.submissions: dict[str, Submission] = {}
        """Unfinished submissions of single groups, keyed by the first rollout. Only these can be aborted or moved."""

    def assign(self, sizes: Mapping[Any, int], excluded: Collection[str] = ()) -> dict[str, list[Any]]:
        """Assign each group to the engine that is expected to finish it first. Return groups by engine name. `sizes`
        maps each group to its number of requests. `excluded` engines receive groups only if no other engine is left."""
        load, slowness = Counter(self.load), self._slowness()
        assigned = {name: [] for name in [name for name in self.live if name not in excluded] or self.live}
        for group, size in sizes.items():
            name = min(assigned, key=lambda name: (load[name] + size) * slowness[name])
            load[name] += size
            assigned[name].append(group)
        return {name: groups for name, groups in assigned.items() if groups}

    def measure(self, name: str, seconds: float, num_steps: int) -> None:
        """Record an engine's sampling time since the last measurement. Each step samples one token per request."""
        if num_steps:
            latency = seconds / num_steps
            self._latencies[name] = fmean((latency, self._latencies.get(name, latency)))

    def _slowness(self) -> dict[str, float]:
        """Return each engine's slowdown relative to the fastest one. A slowdown of at most SLOW is returned as 1."""
        if not self._weighs_speed:
            return dict.fromkeys(self.live, 1.0)
        fastest = min((self._latencies[name] for name in self.live if name in self._latencies), default=1.0)
        times = {name: self._latencies.get(name, fastest) / fastest for name in self.live}
        return {name: factor if factor > SLOW else 1.0 for name, factor in times.items()}

    def abort(self, groups: Collection[Sequence[str]]) -> None:
        """Abort groups that were submitted alone. Their submissions finish soon: with Aborted, or with samples if the
        group had already finished. Each group is given by the names of its rollouts."""
        pending = [self.submissions[group[0]] for group in groups if group[0] in self.submissions]
        for submission in pending:
            submission.is_aborted = True
        self._send_aborts(pending)

    def reassign_stragglers(self, groups: Collection[Sequence[str]]) -> None:
        """Restart groups from much slower engines on idle engines. Each group is given by the names of its rollouts."""
        slowness = self._slowness()
        if not any(self.load[name] == 0 and slowness[name] < MUCH_SLOWER for name in self.live):
            return
        moving: dict[str, list[Submission]] = defaultdict(list)
        for submission in [self.submissions[group[0]] for group in groups if group[0] in self.submissions]:
            if not submission.is_moving and slowness.get(submission.engine, 0.0) >= MUCH_SLOWER:
                submission.is_moving = True
                moving[submission.engine].append(submission)
        for name, submissions in moving.items():
            print(
                f"rollout: {name} takes {slowness[name]:.1f} times as long per token as the fastest engine, so idle "
                f"engines restart {len(submissions)} of its prompts",
                flush=True,
            )
            self._send_aborts(submissions)

    def _send_aborts(self, submissions: Collection[Submission]) -> None:
        names: dict[tuple[Abort, str], set[str]] = defaultdict(set)
        for submission in submissions:
            names[submission.abort, submission.engine].add(submission.name)
        for (abort, engine), groups in names.items():
            if engine in self.live:
                abort(engine, groups)

    def lose(self, name: str) -> bool:
        """Remove a lost engine from the router. Return whether the engine may restart."""
        self.live.remove(name)
        self._latencies.pop(name, None)
        self.losses[name] += 1
        return self.losses[name] <= RESTARTS

    def rejoin(self, name: str) -> None:
        """Add a restarted engine at its old index."""
        self.live = [engine for engine in self.engines if engine in self.live or engine == name]


class Submission:
    """Groups that were submitted together, until each has its samples or is aborted. Alternate `place` and `collect`
    until `is_done`. Groups of a lost or slow engine are placed again.

    Consumes: the samples that engines return, in `collect`. Waits for: nothing; its caller waits for the engines.
    Unblocked by: `collect`. Groups are then complete, or are placed again on the remaining engines.
    """

    def __init__(self, router: Router, groups: Sequence[Sequence[str]], abort: Abort):
        """Submit groups, each as the names of its rollouts. `abort` is a function that aborts them."""
        self._router, self.groups, self.abort = router, groups, abort
        self.name, self.engine = groups[0][0], ""
        """Name and engine of the group, if the submission has only one."""
        self.is_aborted = self.is_moving = False
        """Whether an abort was requested: to drop the groups (is_aborted), or to move them to a different engine."""
        self._results: dict[int, list[Any] | Aborted] = {}
        self._assigned: dict[str, list[int]] = {}
        """Indices of the running groups, by engine name."""
        self._requests: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        """Engine name -> number of running requests, and number of processes that the engine had lost before."""
        self._slow: list[str] = []
        """Engines whose groups move to different engines."""
        if len(groups) == 1:
            router.submissions[self.name] = self

    @property
    def is_done(self) -> bool:
        return len(self._results) == len(self.groups)

    @property
    def results(self) -> list[list[Any] | Aborted]:
        """The samples of each group, or Aborted, in order."""
        return [self._results[i] for i in range(len(self.groups))]

    def place(self) -> dict[str, list[int]]:
        """Assign the groups without a result to engines. Return their indices by engine name."""
        sizes = {i: len(group) for i, group in enumerate(self.groups) if i not in self._results}
        self._assigned = self._router.assign(sizes, self._slow)
        self._requests = {name: sum(sizes[i] for i in part) for name, part in self._assigned.items()}
        self._losses = {name: self._router.losses[name] for name in self._assigned}
        self._router.load.update(self._requests)
        self.engine = next(iter(self._assigned))
        return self._assigned

    def collect(self, answers: Mapping[str, Sequence[Sequence[Any]] | Aborted]) -> list[str]:
        """Record the results of the placed groups. Return the lost engines whose loss the router has not recorded yet.
        `answers` maps each live engine to the samples of its rollouts, or to Aborted."""
        self._router.load.subtract(self._requests)
        lost = [name for name in self._assigned if name not in answers]
        self._slow = []
        for name, numbers in self._assigned.items():
            answer = answers.get(name, Aborted(0) if self.is_aborted else ())
            if isinstance(answer, Aborted) and self.is_moving and not self.is_aborted:
                self._slow.append(name)
            elif isinstance(answer, Aborted):
                self._results |= dict.fromkeys(numbers, answer)
            elif name in answers:
                rollouts = iter(answer)
                self._results |= {i: [s for _ in self.groups[i] for s in next(rollouts)] for i in numbers}
        self.is_moving = False
        if self.is_done:
            self._router.submissions.pop(self.name, None)
        return [name for name in lost if self._router.losses[name] == self._losses[name]]
