"""The processes of a role, and the one way to call them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from megarl.cluster.pending import Pending, ready
from megarl.cluster.placement import VISIBLE, Process
from megarl.cluster.session import Session
from megarl.cluster.supervision.logs import log_to
from megarl.config.schema import TimeoutKind

CALLS_AT_ONCE = 100_000
"""The calls that one event loop may have under way. Prompts that are begun ahead are a call each, and others must get
through beside them; Ray's default is 1,000."""

W = TypeVar("W")
"""The class of the workers, of which each process of the role holds one."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedResult:
    """The value that a call returned, and when it ran: seconds since the epoch, by the clock of the process."""

    value: Any
    begin: float
    end: float


class ProcessActor:
    """One process of the run, as a Ray actor. It makes its worker when it starts, and then runs functions on it.

    Torch, Megatron and vLLM are imported here, in the actor's own process, never in the driver's.
    """

    def __init__(self, process: Process, logs: Path):
        log_to(logs / f"{process.name}.log")
        os.environ.update(process.environment(os.environ.get(VISIBLE)))
        self._process = process
        self._worker: Any = None

    def run(self, function: bytes, *arguments: Any) -> TimedResult:
        """Runs function(worker, *arguments), of a pickled function."""
        return self.call(cloudpickle.loads(function), *arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> TimedResult:
        """Runs function(worker, *arguments)."""
        begin = time.time()
        value = function(self._worker, *arguments)
        return TimedResult(value, begin, time.time())


class Group(Generic[W]):
    """The processes of a role. Their methods submit calls, whose results the caller waits for."""

    def __init__(self, session: Session, title: str, actors: Mapping[str, ActorHandle]):
        """title: the name of the processes in the machine's list of them. actors: the actors by the processes'
        names."""
        self._session, self._title, self._actors = session, title, dict(actors)
        self._share_taken = time.monotonic()

    def take_idle_share(self) -> Pending[float]:
        """Returns the share of the time since this was last asked in which the processes had no task."""
        return ready(self._idle_share([self._session.trace.take_seconds(name) for name in self._actors]))

    def _idle_share(self, busy: Sequence[float]) -> float:
        """busy: the seconds in which each process had a task."""
        now = time.monotonic()
        elapsed, self._share_taken = now - self._share_taken, now
        return 1 - sum(busy) / (len(busy) * elapsed)

    def _submit(
        self, phase: str, limit: TimeoutKind, task: str, function: Callable[..., T], *arguments: Any
    ) -> Pending[list[T]]:
        """Runs function(worker, *arguments) in every process. The result has their return values, in their order.

        phase   the wait of the driver, for its messages
        limit   the key of cluster.timeouts that bounds it
        task    the work of the process, for its title and for the trace
        """
        return self._read(phase, limit, task, self._calls(task, function, *arguments))

    def _submit_each(
        self, phase: str, limit: TimeoutKind, task: str, function: Callable[..., T], arguments: Iterable[Sequence[Any]]
    ) -> Pending[list[T]]:
        """Runs function(worker, *arguments) as _submit does, in each process with its own arguments."""
        pickled = cloudpickle.dumps(function)
        pairs = zip(self._actors.items(), arguments, strict=True)
        calls = {
            name: self._call(actor, task, pickled, *process_arguments) for (name, actor), process_arguments in pairs
        }
        return self._read(phase, limit, task, calls)

    def _submit_to_first(
        self, phase: str, limit: TimeoutKind, task: str, function: Callable[..., T], *arguments: Any
    ) -> Pending[T]:
        """Runs function(worker, *arguments) as _submit does, in the first process only."""
        name, actor = next(iter(self._actors.items()))
        calls = {name: self._call(actor, task, cloudpickle.dumps(function), *arguments)}
        return self._read(phase, limit, task, calls).then(lambda answers: answers[0])

    def _calls(self, task: str, function: Callable[..., T], *arguments: Any) -> dict[str, ray.ObjectRef]:
        """Runs function(worker, *arguments) in every process. Returns the calls, for the caller to submit."""
        pickled = cloudpickle.dumps(function)
        return {name: self._call(actor, task, pickled, *arguments) for name, actor in self._actors.items()}

    def _call(self, actor: ActorHandle, task: str, function: bytes, *arguments: Any) -> ray.ObjectRef:
        """Runs a pickled function(worker, *arguments): pickled once for all processes, not once for each."""
        return actor.run.options(name=f"{self._title}.{task}").remote(function, *arguments)

    def _read(
        self, phase: str, limit: TimeoutKind, task: str, calls: Mapping[str, ray.ObjectRef]
    ) -> Pending[list[Any]]:
        """Submits calls whose answers are `TimedResult`s."""
        pending = self._session.submit(calls, phase, limit)
        return pending.then(lambda answers: list(self._session.trace.add(task, answers).values()))
