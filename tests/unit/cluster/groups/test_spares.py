"""Spare processes become ranks if they are ready and alive; the run never waits for them or depends on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.groups import spares
from megarl.cluster.groups.spares import MAX_FAILURES, PROMOTE_S, SpareProcesses
from megarl.cluster.placement import Process

RANKS = [Process("trainer", 0, threads=1), Process("trainer", 1, threads=2)]


class Call:
    """A remote call, and the reference to its result."""

    def __init__(self, actor: Actor, method: str, arguments: tuple = ()):
        self.actor, self.method, self.arguments = actor, method, arguments

    @property
    def has_ended(self) -> bool:
        return self.actor.is_dead or not (self.actor.is_importing or self.actor.is_suspended)


class Actor:
    """An actor, which imports until the test changes that."""

    def __init__(self, process: Process):
        self.process, self.calls = process, []
        self.is_importing, self.is_suspended, self.is_dead, self.is_killed = True, False, False, False
        self.call = SimpleNamespace(remote=lambda method, *arguments: self._start(method, *arguments))
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self._start("ping"))

    def _start(self, method: str, *arguments) -> Call:
        self.calls.append(Call(self, method, arguments))
        return self.calls[-1]


class Ray:
    """Ray's functions, without time: a wait ends at once, whatever its timeout."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        assert num_returns == len(calls) > 0
        self.timeouts.append(timeout)
        ended = [call for call in calls if call.has_ended]
        return ended, [call for call in calls if call not in ended]

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True

    def outcome(self, call: Call) -> tuple[None, Exception | None]:
        if not call.has_ended:
            return None, TimeoutError()
        return None, RuntimeError() if call.actor.is_dead else None


class Case:
    """The spares of two ranks, and the actors that were started for them."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.spares = SpareProcesses(RANKS, self._create, Path("logs"))

    def _create(self, process: Process) -> Actor:
        self.actors.append(Actor(process))
        return self.actors[-1]

    def refill(self, are_ready: bool = True) -> list[Actor]:
        """Refill the spares. Return the new actors, after their imports if `are_ready` is set."""
        before = len(self.actors)
        self.spares.refill()
        for actor in self.actors[before:]:
            actor.is_importing = not are_ready
        return self.actors[before:]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(spares, "ray", ray)
    monkeypatch.setattr(spares, "outcome", ray.outcome)
    return ray


@pytest.fixture
def case(ray: Ray) -> Case:
    return Case()


def test_ready_spares_become_the_ranks(case: Case) -> None:
    first, second = case.refill()
    assert [actor.process.name for actor in (first, second)] == ["trainer-0", "trainer-1"]
    assert [actor.process.threads for actor in (first, second)] == [1, 2]
    assert case.spares.take() == {"trainer-0": first, "trainer-1": second}
    assert [(call.method, call.arguments) for call in second.calls] == [
        ("prepare", ()),
        ("promote", (RANKS[1], Path("logs"))),
    ]
    assert not first.is_killed
    assert len(case.refill()) == 2, "the next loss needs new ones"


def test_without_spares_ranks_start_in_new_processes(case: Case) -> None:
    assert case.spares.take() == {}


def test_spares_start_once_and_nothing_waits_for_them(case: Case, ray: Ray) -> None:
    assert len(case.refill(are_ready=False)) == 2
    for _ in range(10):
        assert case.refill() == []
    assert set(ray.timeouts) == {0}
    assert len(case.actors[0].calls) == 1, "calls must not accumulate"


def test_importing_spare_is_not_used(case: Case) -> None:
    first, second = case.refill()
    second.is_importing = True
    assert case.spares.take() == {"trainer-0": first}
    assert second.is_killed and not first.is_killed
    assert [call.method for call in second.calls] == ["prepare"], "waiting for it would take PROMOTE_S"


@pytest.mark.parametrize("failure", ["is_dead", "is_suspended"])
def test_failed_spare_is_not_used(case: Case, ray: Ray, failure: str) -> None:
    """It fails after it was ready. A suspended process does not respond, so the wait must have a limit."""
    first, second = case.refill()
    case.refill()
    setattr(first, failure, True)
    assert case.spares.take() == {"trainer-1": second}
    assert first.is_killed and ray.timeouts[-1] == PROMOTE_S


def test_dead_spare_is_replaced(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = case.refill()
    case.refill()
    first.is_dead = True
    [third] = case.refill()
    log = "logs/spare-trainer-0.log"
    assert f"process of trainer-0 failed, and the run continues. See {log}" in capsys.readouterr().out
    assert case.spares.take() == {"trainer-0": third, "trainer-1": second}


def test_spare_that_always_fails_is_given_up(case: Case) -> None:
    for number in range(10):
        for actor in case.refill():
            actor.is_dead = actor.process.index == 0
        assert sum(actor.process.index == 0 for actor in case.actors) == min(number + 1, MAX_FAILURES)
    assert list(case.spares.take()) == ["trainer-1"]


def test_spare_of_a_rank_that_moves_is_dropped(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = case.refill()
    case.spares.drop(["trainer-1", "trainer-7"])
    assert second.is_killed and not first.is_killed
    assert case.spares.take() == {"trainer-0": first}
    assert capsys.readouterr().out == ""
