"""The router gives each group exactly one result, whatever happens to the engines. Engines run on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from megarl.rollout.router import RESTARTS, Aborted, Router, Submission


class Cluster:
    """Engines that sample one group at a time, each at its own number of seconds per group."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.now = seconds, 0.0
        self.router = Router(list(seconds), weighs_speed=True)
        self.running: dict[tuple[Submission, str], float] = {}
        """(submission, engine) -> time at which the engine finishes its part."""
        self.aborting: set[str] = set()
        self.answers: dict[Submission, dict] = {}
        self.finished: dict[Submission, float] = {}
        self.started: list[tuple[str, str]] = []
        """Each start of a group on an engine."""
        self.dead: set[str] = set()
        """Lost engines. The router sees a loss only when a submission with groups on the engine is collected."""

    def submit(self, *groups: Sequence[str]) -> Submission:
        submission = Submission(self.router, groups, self.abort)
        self._start(submission)
        return submission

    def _start(self, submission: Submission) -> None:
        self.answers[submission] = {}
        assigned = submission.place()
        for name, part in assigned.items():
            begin = max([end for (_, engine), end in self.running.items() if engine == name], default=self.now)
            self.running[submission, name] = begin + self.seconds[name] * len(part)
            self.started += [(name, submission.groups[i][0]) for i in part]
        for name in self.dead & assigned.keys():
            self._lose(name)

    def abort(self, engine: str, groups: Collection[str]) -> None:
        assert engine in self.router.live
        self.aborting |= groups

    def step(self) -> None:
        """Finish the part of a submission that ends first, and advance the clock to that time."""
        by_abort = {key: self.now if key[0].name in self.aborting else end for key, end in self.running.items()}
        self.end(min(by_abort, key=by_abort.get))

    def end(self, key: tuple[Submission, str]) -> None:
        submission, name = key
        end = self.running.pop(key)
        first = submission.name
        if first in self.aborting:
            self.aborting.remove(first)
            self._answer(submission, name, Aborted(5))
        else:
            self.now = max(self.now, end)
            part = [submission.groups[i] for i in submission._assigned[name]]
            self._answer(submission, name, [[f"{rollout} by {name}"] for group in part for rollout in group])

    def lose(self, name: str) -> None:
        self.dead.add(name)
        self._lose(name)

    def rejoin(self) -> None:
        for name in self.dead - {*self.router.live}:
            self.dead.remove(name)
            self.router.rejoin(name)

    def _lose(self, name: str) -> None:
        for key in [key for key in self.running if key[1] == name]:
            del self.running[key]
            self.aborting.discard(key[0].name)
            self._answer(key[0], name, None)

    def _answer(self, submission: Submission, name: str, answer: object) -> None:
        if answer is not None:
            self.answers[submission][name] = answer
        if not any(key[0] is submission for key in self.running):
            for lost in submission.collect(self.answers[submission]):
                self.router.lose(lost)
            if submission.is_done:
                self.finished[submission] = self.now
            else:
                self._start(submission)


def measured(seconds: dict[str, float]) -> Cluster:
    cluster = Cluster(seconds)
    for name in seconds:
        cluster.router.measure(name, seconds[name], 1)
    return cluster


@pytest.mark.parametrize("seed", range(40))
def test_each_group_has_one_result_despite_losses_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    cluster = measured({f"engine-{i}": rng.choice([1.0, 1.0, 3.0]) for i in range(4)})
    submissions, unwanted = [], set()
    for number in range(60):
        groups = [[f"{number}.{i}.{k}" for k in range(2)] for i in range(rng.choice([1, 1, 1, 3]))]
        submissions.append(cluster.submit(*groups))
        for _ in range(rng.randint(0, 2)):
            pending = [submission for submission in submissions if submission not in cluster.finished]
            alone = [submission for submission in pending if len(submission.groups) == 1]
            match rng.randrange(6):
                case 0 if len(cluster.dead) < 3:
                    cluster.lose(rng.choice(sorted(cluster.seconds.keys() - cluster.dead)))
                case 1:
                    cluster.rejoin()
                case 2 if alone:
                    unwanted.add(rng.choice(alone))
                    cluster.router.abort([submission.groups[0] for submission in unwanted if submission in pending])
                case 3 if alone:
                    cluster.router.reassign_stragglers([submission.groups[0] for submission in alone])
                case _ if cluster.running:
                    cluster.step()
    while cluster.running:
        cluster.step()
    assert set(cluster.finished) == set(submissions)
    for submission in submissions:
        for group, result in zip(submission.groups, submission.results, strict=True):
            if isinstance(result, Aborted):
                assert submission in unwanted
            else:
                assert [line.split()[0] for line in result] == group
                assert len({line.split()[-1] for line in result}) == 1, "a group must stay on one engine"
    assert not +cluster.router.load and not cluster.router.submissions


@pytest.mark.parametrize("moves", [False, True])
def test_idle_engine_finishes_the_group_of_a_slow_engine_sooner(moves: bool) -> None:
    cluster = measured({"fast": 1.0, "slow": 8.0})
    cluster.seconds["slow"] = 100.0
    submissions = [cluster.submit([f"{i}"]) for i in range(9)]
    [straggler] = [submission for submission in submissions if submission.engine == "slow"]
    while len(cluster.finished) < 8:
        cluster.router.reassign_stragglers([straggler.groups[0]])
        assert not cluster.aborting, "no engine is idle yet"
        cluster.step()
    if moves:
        for _ in range(2):
            cluster.router.reassign_stragglers([straggler.groups[0]])
    while cluster.running:
        cluster.step()
    assert cluster.finished[straggler] == (9.0 if moves else 100.0)
    assert cluster.started.count(("slow", straggler.name)) == 1
    assert straggler.results == [[f"8 by {'fast' if moves else 'slow'}"]]


def test_moved_group_stays_on_the_only_engine_left() -> None:
    cluster = measured({"fast": 1.0, "slow": 8.0})
    cluster.router.load["fast"] = 9
    straggler = cluster.submit(["a"])
    assert straggler.engine == "slow"
    cluster.router.load["fast"] = 0
    cluster.router.reassign_stragglers([["a"]])
    cluster.router.lose("fast")
    cluster.step()
    assert straggler.engine == "slow" and not straggler.is_done
    cluster.step()
    assert straggler.results == [["a by slow"]]


def test_engine_may_restart_a_limited_number_of_times() -> None:
    router = Router(["a", "b"], weighs_speed=False)
    allowed = []
    for _ in range(RESTARTS + 1):
        allowed.append(router.lose("a"))
        router.rejoin("a")
    assert allowed == [True] * RESTARTS + [False]
    assert router.live == ["a", "b"]
