"""The processes of one role and their Ray actors."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.groups.remote import RemoteMethod
from megarl.cluster.pending import Pending, ready
from megarl.cluster.placement import VISIBLE, Process
from megarl.cluster.session import Session
from megarl.cluster.supervision.logs import log_to

ASYNC_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 100_000}
"""Ray's options for async actors. Each prompt in flight is one call, and these calls must not block other calls. By
default, an async actor runs at most 1,000 calls at once."""


@dataclass(frozen=True, slots=True)
class TimedResult:
    """The return value of a call, with the start and end of the call in seconds since the epoch on the process's
    clock."""

    value: Any
    begin: float
    end: float


class ProcessActor:
    """One process in the run: a Ray actor that holds a worker and runs its methods. Megatron and vLLM are imported in
    the actor's process, never in the driver's."""

    def __init__(self, process: Process, logs: Path):
        log_to(logs / f"{process.name}.log")
        os.environ.update(process.environment(os.environ.get(VISIBLE)))
        self._process = process
        self._worker: Any = None

    def call(self, method: str, *arguments: Any) -> TimedResult:
        """Run a method by name: the actor's own if it has one, otherwise the worker's."""
        begin = time.time()
        value = self._find(method)(*map(self._receive, arguments))
        return TimedResult(value, begin, time.time())

    def _find(self, method: str) -> Callable[..., Any]:
        return getattr(self, method) if hasattr(self, method) else getattr(self._worker, method)

    def _receive(self, argument: Any) -> Any:
        """Convert a remote call's argument to the type that the method expects."""
        return argument


class AsyncProcessActor(ProcessActor):
    """A process whose methods may be coroutines. Ray runs all of its calls in one event loop."""

    async def call(self, method: str, *arguments: Any) -> TimedResult:  # pyright: ignore[reportIncompatibleMethodOverride]
        begin = time.time()
        value = self._find(method)(*arguments)
        if inspect.isawaitable(value):
            value = await value
        return TimedResult(value, begin, time.time())


class WorkerGroup:
    """The processes of one role. A remote method runs in all of them and returns a Pending with their results."""

    title: ClassVar[str]
    """Name of the actor class. The titles of its processes start with this name."""

    def __init__(self, session: Session, role: str, actors: Mapping[str, ActorHandle]):
        """`role` names the group in error messages, and `actors` are keyed by process name."""
        self.role, self._session, self._actors = role, session, dict(actors)
        self._share_taken = time.monotonic()

    @property
    def actors(self) -> Mapping[str, ActorHandle]:
        """The actors by process name."""
        return self._actors

    def take_idle_share(self) -> Pending[float]:
        """Return the fraction of the time since the last call that the processes were idle."""
        return ready(self._idle_share([self._session.trace.take_seconds(name) for name in self._actors]))

    def _idle_share(self, busy: Sequence[float]) -> float:
        """Return the idle fraction. busy: seconds of work in each process since the last call."""
        now = time.monotonic()
        elapsed, self._share_taken = now - self._share_taken, now
        return 1 - sum(busy) / (len(busy) * elapsed)

    def phase(self, method: RemoteMethod) -> str:
        """Describe what the driver does while it waits for this method, for error messages."""
        return method.phase or f"{self.role} {method.name.replace('_', ' ')}"

    def read(self, method: RemoteMethod, calls: Mapping[str, ray.ObjectRef]) -> Pending[list[Any]]:
        """Wait for calls of a remote method. The result lists the return values in the order of the calls."""
        pending = self._session.submit(calls, self.phase(method), method.timeout)
        return pending.then(lambda results: list(self._session.trace.add(method.name, results).values()))
