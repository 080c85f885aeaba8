"""The driver's side of rollouts in environments: placement with the engines, lost and slow engines, and aborts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.groups import environments
from megarl.cluster.groups.engines import EngineGroup, Sampled
from megarl.cluster.groups.environments import EnvironmentGroup
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import Process
from megarl.core.prompt import Prompt
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.router import Aborted, Router


class Engines:
    """An EngineGroup with two engines and without processes."""

    route, _route = EngineGroup.route, EngineGroup._route

    def __init__(self) -> None:
        self.router = Router(["engine-0", "engine-1"], weighs_speed=True)
        self.dropped: list[str] = []

    @property
    def actors(self) -> dict[str, str]:
        return {name: f"handle of {name}" for name in self.router.live}

    _actors = actors

    def drop(self, lost: Collection[str], phase: str) -> None:
        for name in lost:
            self.dropped.append(name)
            self.router.lose(name)


class Beside:
    """A fake of the process that runs an engine's rollouts. Each rollout has two samples, which name their engine. A
    call runs when a caller waits for it.
    """

    dead: set[str]
    """Handles of lost engines."""

    def __init__(self, name: str):
        self.name, self.seen, self.aborted = name, [], set()
        self.call = SimpleNamespace(options=lambda name: SimpleNamespace(remote=self._start))
        self.abort = SimpleNamespace(remote=self.aborted.update)

    def _start(self, method: str, requests: Sequence[SamplingRequest], engine: str, argument: Any):
        self.seen.append((method, [request.sample_id for request in requests], argument))

        def result() -> list[list[str]] | Aborted | None:
            if engine in Beside.dead:
                return None
            if requests[0].sample_id in self.aborted:
                self.aborted.remove(requests[0].sample_id)
                return Aborted(7)
            return [[f"{request.sample_id}{k} on {engine.split()[-1]}" for k in "ab"] for request in requests]

        return result


class Session:
    logs = Path("logs")
    trace = SimpleNamespace(add=lambda task, answers: answers.values)
    watch = staticmethod(lambda actors: None)

    def on_node(self, actor_class: Any, process: Process) -> Any:
        return SimpleNamespace(remote=lambda process, logs: Beside(process.name))

    def submit(self, calls: dict, phase: str, timeout: str) -> Pending[Answers]:
        return ready(None).then(lambda _: Answers({name: call() for name, call in calls.items()}, set()))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> EnvironmentGroup:
    Beside.dead = set()
    monkeypatch.setattr(environments, "EnvironmentActor", object())
    processes = [Process("environments", index, 1) for index in range(2)]
    return EnvironmentGroup(Session(), None, Path("model"), processes, Engines())


def ask(group: EnvironmentGroup, *names: str) -> Pending[list[Sampled]]:
    """Start two rollouts for each name."""
    requests = [[SamplingRequest(f"{name}.{k}", Prompt(name, "", [1]), seed=0) for k in range(2)] for name in names]
    return group.generate(requests, "listener")


def samples(name: str, engine: str) -> list[str]:
    return [f"{name}.{k}{part} on {engine}" for k in range(2) for part in "ab"]


def test_groups_run_beside_their_engine_and_keep_their_order(group) -> None:
    found = ask(group, "x", "y", "z").result()
    assert found == [samples("x", "engine-0"), samples("y", "engine-1"), samples("z", "engine-0")]
    first, second = group.actors.values()
    assert first.seen == [("train", ["x.0", "x.1", "z.0", "z.1"], "listener")]
    assert second.seen == [("train", ["y.0", "y.1"], "listener")]


def test_rollouts_of_a_lost_engine_restart_beside_another(group) -> None:
    under_way = [ask(group, name) for name in "wxyz"]
    Beside.dead = {"handle of engine-1"}
    found = [pending.result() for pending in under_way]
    assert found == [[samples(name, "engine-0")] for name in "wxyz"]
    assert group._engines.dropped == ["engine-1"], "the loss counts once"
    Beside.dead = set()
    group._engines.router.rejoin("engine-1")
    assert ask(group, "v", "u").result() == [samples("v", "engine-0"), samples("u", "engine-1")]


def test_aborted_rollouts_are_not_restarted(group) -> None:
    kept, stale = ask(group, "x"), ask(group, "y")
    group._engines.router.abort([["y.0", "y.1"]])
    assert [actor.aborted for actor in group.actors.values()] == [set(), {"y.0"}]
    assert stale.result() == [Aborted(7)]
    assert kept.result() == [samples("x", "engine-0")]


def test_rollouts_of_a_slow_engine_move(group) -> None:
    router = group._engines.router
    router.measure("engine-0", 1.0, 100)
    fast, slow = ask(group, "x"), ask(group, "y")
    router.measure("engine-1", 5.0, 100)
    router.reassign_stragglers([["y.0", "y.1"]])
    assert not any(actor.aborted for actor in group.actors.values()), "no engine is idle"
    fast.result()
    router.reassign_stragglers([["y.0", "y.1"]])
    assert slow.result() == [samples("y", "engine-0")]
    assert not +router.load
