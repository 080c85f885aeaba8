"""Declarations of remote methods match their implementations, and a call runs in every process."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from megarl.cluster.groups.copies import READ_ONLY_METHODS
from megarl.cluster.groups.engine_actor import EngineActor, ImageEngineActor
from megarl.cluster.groups.engines import EngineGroup, ImageEngineGroup
from megarl.cluster.groups.environments import EnvironmentActor, EnvironmentGroup
from megarl.cluster.groups.group import AsyncProcessActor, ProcessActor, TimedResult, WorkerGroup
from megarl.cluster.groups.remote import Declaration, remote
from megarl.cluster.groups.reward_models import (
    RewardEngineActor,
    RewardEngineGroup,
    RewardModelActor,
    RewardModelGroup,
)
from megarl.cluster.groups.rewards import RewardActor, RewardGroup, RewardWorker
from megarl.cluster.groups.teachers import TeacherActor, TeacherEngineActor, TeacherEngineGroup, TeacherGroup
from megarl.cluster.groups.trainers import ImageTrainerGroup, TrainerActor, TrainerGroup
from megarl.cluster.pending import Answers, ready
from megarl.config.cluster_schema import TimeoutKind
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.megatron.workers.model import ModelWorker
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.engine import Engine
from megarl.rollout.vllm.engine import VllmEngine

GROUPS: list[tuple[type[WorkerGroup], Any, type[Any]]] = [
    (TrainerGroup, TrainerActor, ActorWorker),
    (RewardModelGroup, RewardModelActor, ModelWorker),
    (TeacherGroup, TeacherActor, ModelWorker),
    (RewardEngineGroup, RewardEngineActor, object),
    (TeacherEngineGroup, TeacherEngineActor, object),
    (EngineGroup, EngineActor, VllmEngine),
    (ImageEngineGroup, ImageEngineActor, DiffusersEngine),
    (ImageTrainerGroup, TrainerActor, DenoiserWorker),
    (RewardGroup, RewardActor, RewardWorker),
    (EnvironmentGroup, EnvironmentActor, object),
]
"""The worker groups of a run, each with its actor class and worker class."""


RAYS_OWN = "_ray_trace_ctx"
"""The parameter that Ray adds to actor methods."""


def declarations(group: type[WorkerGroup]) -> dict[str, Declaration]:
    """Return the remote methods of a worker group by attribute name."""
    found = {name: item for owner in reversed(group.__mro__) for name, item in vars(owner).items()}
    return {name: item for name, item in found.items() if isinstance(item, Declaration)}


def parameters(function: Any) -> dict[str, str]:
    """Return the annotation of each parameter except `self`. A rank receives a LocalBatch in place of a RankBatch."""
    given = inspect.signature(function).parameters.values()
    own = [item for item in given if item.name not in ("self", RAYS_OWN)]
    return {item.name: item.annotation.replace("RankBatch", "LocalBatch") for item in own}


CASES = [(group, actor, worker, name) for group, actor, worker in GROUPS for name in declarations(group)]


@pytest.mark.parametrize(("group", "actor", "worker", "name"), CASES, ids=[f"{c[0].__name__}.{c[3]}" for c in CASES])
def test_remote_declarations_match_their_definitions(group, actor, worker, name) -> None:
    declaration = declarations(group)[name]
    method = declaration.method
    owner = actor.__ray_metadata__.modified_class.__ray_actor_class__
    defined = getattr(owner, method.name, None) or getattr(worker, method.name)
    assert parameters(declaration.function) == parameters(defined)
    assert declaration.function.__annotations__["return"] == defined.__annotations__["return"]
    assert method.timeout in get_args(TimeoutKind)


def test_engine_methods_match_their_protocol() -> None:
    for name in ("pause", "resume", "sleep", "info", "differing", "refit"):
        assert parameters(getattr(Engine, name)) == parameters(getattr(VllmEngine, name))


class Worker:
    def double(self, value: int) -> int:
        return 2 * value

    async def later(self, value: int) -> int:
        return 3 * value


class Doubles(WorkerGroup):
    title = "DoublingActor"

    @remote(timeout="update")
    def _double(self, value: int) -> int: ...

    @remote(timeout="rollout", phase="a phase")
    def where(self) -> str:
        """Return the actor's name."""


class FakeSession:
    """A session whose calls have already returned."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []
        self.tasks: list[str] = []
        self.trace = SimpleNamespace(add=self._add)

    def submit(self, calls: dict, phase: str, timeout: str):
        self.submitted.append((phase, timeout))
        return ready(Answers(calls, set()))

    def _add(self, task: str, answers: Answers) -> dict[str, Any]:
        self.tasks.append(task)
        return {name: timed.value for name, timed in answers.values.items()}


def actor_named(name: str, titles: list[str], kind: type[ProcessActor] = ProcessActor) -> Any:
    """Return a handle whose calls run at once."""
    actor = type("Actor", (kind,), {"__init__": lambda _: None, "where": lambda _: name})()
    actor._worker = Worker()

    def options(name: str) -> SimpleNamespace:
        titles.append(name)
        return SimpleNamespace(remote=actor.call)

    return SimpleNamespace(call=SimpleNamespace(options=options), actor=actor)


def test_call_runs_in_every_process() -> None:
    session, titles = FakeSession(), []
    group = Doubles(session, "doubles", {name: actor_named(name, titles) for name in ("a", "b")})
    assert group._double(3).result() == [6, 6]
    assert group._double.on_each([(1,), (2,)]).result() == [2, 4]
    assert group._double.on_first(5).result() == 10
    assert {name: call.value for name, call in group._double.start(4).items()} == {"a": 8, "b": 8}
    assert group.where().result() == ["a", "b"], "the actor's own method takes precedence"
    assert session.submitted == [("doubles double", "update")] * 3 + [("a phase", "rollout")]
    assert session.tasks == ["double"] * 3 + ["where"]
    assert set(titles) == {"DoublingActor.double", "DoublingActor.where"}
    with pytest.raises(ValueError, match="zip"):
        group._double.on_each([(1,)])


def test_async_actor_awaits_coroutines() -> None:
    actor = actor_named("a", [], AsyncProcessActor).actor
    for method, expected in (("double", 4), ("later", 6), ("where", "a")):
        found = asyncio.run(actor.call(method, *([2] if method != "where" else [])))
        assert isinstance(found, TimedResult) and found.value == expected and found.begin <= found.end


def test_worker_group_has_only_declared_methods() -> None:
    assert not hasattr(Doubles(FakeSession(), "doubles", {}), "later")


def test_read_only_methods_are_remote_methods() -> None:
    """A method under another name would wait for the copy of the state."""
    assert {item.method.name for item in declarations(TrainerGroup).values()} >= READ_ONLY_METHODS


def test_tokens_of_an_aborted_request_count_once():
    """A group may be aborted as a straggler, and again because it is dropped, before the engine's next step."""

    async def count() -> int:
        completion = asyncio.get_running_loop().create_future()
        completion.cancel()
        pending = SimpleNamespace(request=SimpleNamespace(sample_id="5.0.0"), completion=completion)
        return VllmEngine.num_unfinished(SimpleNamespace(_pending={"0": pending}), {"5.0.0"})

    assert asyncio.run(count()) == 0
