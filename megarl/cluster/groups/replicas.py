"""Engine replicas: Ray actors that receive work from a router. The run survives the loss of a replica if another one
can take over its work."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failure import cause, write_stacks
from megarl.cluster.groups.group import ProcessActor, TimedResult, WorkerGroup
from megarl.cluster.groups.remote import RemoteMethod, remote
from megarl.cluster.pending import Answers, Pending, outcome
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import processes
from megarl.config.schema import Config
from megarl.core.errors import RunFailure
from megarl.rollout.router import Abort, Aborted, Router, Submission

Q = TypeVar("Q")
T = TypeVar("T")


class ReplicaActor(ProcessActor):
    """One replica. Its worker is an engine with an attribute `has_lost_a_rank`, true once one of its ranks has died.

    `other_nodes` is for replicas that span several nodes; see VllmActor."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        process: Process,
        other_nodes: Sequence[NodeAffinitySchedulingStrategy],
        logs: Path,
    ):
        super().__init__(process, logs)
        self._config, self._model_folder, self._logs = config, model_folder, logs

    def call(self, method: str, *arguments: Any) -> TimedResult:
        with self._end_if_rank_died():
            return super().call(method, *arguments)

    @contextmanager
    def _end_if_rank_died(self) -> Iterator[None]:
        """If the body raises and one of the engine's ranks has died, exit this process, because the engine is lost."""
        try:
            yield
        except Exception:
            if self._worker is not None and self._is_lost:
                end_process()
            raise

    @property
    def _is_lost(self) -> bool:
        """Whether a part of the engine has died."""
        return self._worker.has_lost_a_rank


def end_process() -> None:
    """Exit this process and terminate the engine's ranks on this node, because the engine is lost."""
    processes.end_descendants()
    os._exit(1)


class ReplicaGroup(WorkerGroup):
    """All engines of one role. All work for one prompt goes to the least-loaded engine, where it shares a prefix
    cache. When an engine is lost, the remaining engines take over its work while it restarts."""

    actor_class: ClassVar[Any]
    """A class derived from ReplicaActor, as a Ray actor."""
    role: str
    awaits_restarts: ClassVar[bool]
    """Whether work waits for a restarting engine if no other engine is left. True only for engines that load weights at
    startup."""

    def __init__(
        self,
        session: Session,
        config: Config,
        model_folder: Path,
        processes: Sequence[Process],
        restarts: bool,
        weighs_speed: bool = False,
    ):
        """
        Args:
            restarts: whether lost engines restart, up to the router's limit.
            weighs_speed: whether slower engines receive less work.
        """

        def launch(process: Process) -> ActorHandle:
            actor, other_nodes = session.on_node(self.actor_class, process), map(session.node_of, process.rest)
            return actor.remote(config, model_folder, process, list(other_nodes), session.logs)

        self._launch, self._restarts = launch, restarts
        self._processes = {process.name: process for process in processes}
        self.router = Router(list(self._processes), weighs_speed)
        self._starting: dict[str, tuple[ActorHandle, list[ray.ObjectRef]]] = {}
        """Restarting engines, each with the calls that it must complete to be ready."""
        super().__init__(session, self.role, {process.name: launch(process) for process in processes})
        self._watch()

    @remote(timeout="start")
    def _start(self) -> None: ...

    def start(self) -> Pending[Any]:
        return self._start()

    @property
    def names(self) -> list[str]:
        """Names of the live processes."""
        return list(self._actors)

    @property
    def may_fail(self) -> list[str]:
        """Processes whose loss does not end the run."""
        return self.names if len(self._actors) > 1 or (self.awaits_restarts and self._restarts) else []

    def _submit(self, method: RemoteMethod, calls: Mapping[str, ray.ObjectRef]) -> Pending[Answers]:
        """Submit calls to engines. The loss of an engine in `may_fail` is not an error."""
        pending = self._session.submit(calls, self.phase(method), method.timeout, may_fail=self.may_fail)
        return pending.then(lambda answers: replace(answers, values=self._session.trace.add(method.name, answers)))

    def _route(
        self,
        phase: str,
        groups: Sequence[Sequence[Q]],
        names: Sequence[Sequence[str]],
        run: Callable[[Mapping[str, Sequence[Q]]], Pending[dict[str, list[list[T]] | Aborted]]],
        abort: Abort,
    ) -> Pending[list[list[T] | Aborted]]:
        """Run each group of requests on one engine. Return the results of each group, or Aborted. The groups of a lost
        engine run again on the remaining engines.

        Args:
            phase: phase of the run, named in the message about a lost engine.
            names: the name of each request.
            run: function that takes the requests of each engine, by engine name, and starts them. Its result omits lost
                engines and maps each other engine to a list of results per request, or to Aborted.
            abort: function that aborts groups on an engine.
        """
        submission = Submission(self.router, names, abort)

        def attempt() -> Pending[list[list[T] | Aborted]]:
            if not self._actors:
                return self._await_restarts(phase).then(lambda _: attempt())
            assigned = submission.place()
            requests = {name: [request for i in part for request in groups[i]] for name, part in assigned.items()}
            return run(requests).then(collect)

        def collect(answers: dict[str, list[list[T]] | Aborted]) -> Any:
            self.drop(submission.collect(answers), phase)
            return submission.results if submission.is_done else attempt()

        return attempt()

    def drop(self, lost: Collection[str], phase: str) -> None:
        """Remove the lost engines, and restart them if `restarts` is set. Raise RunFailure if no engine is left, unless
        work may wait for an engine that is restarting."""
        # Another call may have noticed the loss first.
        lost = [name for name in lost if name in self._actors]
        for name in lost:
            del self._actors[name]
            restarts = self.router.lose(name) and self._restarts
            if restarts:
                actor = self._launch(self._processes[name])
                self._starting[name] = actor, self._start_calls(actor)
            print(
                f"{phase}: {name} died{' and is being restarted' if restarts else ''}. {self._describe_remaining()}. "
                f"See {self._session.logs / name}.log",
                flush=True,
            )
        self._require_engines(phase)
        if lost:
            self._watch()

    def _require_engines(self, phase: str) -> None:
        if not self._actors and not (self.awaits_restarts and self._starting):
            raise RunFailure(f"{phase}: no {self.role} is left. See {self._session.logs}")

    def _start_calls(self, actor: ActorHandle) -> list[ray.ObjectRef]:
        """Start the calls that make a restarted engine ready."""
        return [self._start.on(actor)]

    def _await_restarts(self, phase: str) -> Pending[None]:
        """Wait until the restarting engines have started, and add them to the live ones."""
        calls = {name: calls[-1] for name, (_, calls) in self._starting.items()}
        started = self._session.submit(calls, f"restart of a lost {self.role}", "start", may_fail=list(calls))

        def rejoin(_: Answers) -> None:
            self.rejoin_restarted(phase)
            self._require_engines(phase)

        return started.then(rejoin)

    def rejoin_restarted(self, phase: str) -> None:
        """Add restarted engines to the live ones."""
        for name, (actor, calls) in list(self._starting.items()):
            finished, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if len(finished) < len(calls):
                continue
            del self._starting[name]
            errors = [error for call in calls if (error := outcome(call)[1]) is not None]
            if errors:
                first, logs = {name: errors[0]}, self._session.logs
                write_stacks(first, logs)
                reason = cause(first, f"restart of a lost {self.role}", logs)
                print(f"{reason}. {self._describe_remaining()}", flush=True)
                continue
            actors = self._actors | {name: actor}
            self._actors = {process: actors[process] for process in self._processes if process in actors}
            self.router.rejoin(name)
            print(f"{phase}: {name} rejoined. {self._describe_remaining()}", flush=True)
            self._watch()

    def _describe_remaining(self) -> str:
        if not self._actors and self.awaits_restarts and self._starting:
            return f"Waiting for {', '.join(self._starting)}"
        return f"Continuing with {len(self._actors)} of {len(self._processes)} {self.role}s"

    def _watch(self) -> None:
        """If the loss of an engine would end the run, watch the engines, so that a loss interrupts every wait.
        Otherwise, a loss fails only the calls to the lost engine."""
        self._session.unwatch(self._processes)
        if not self.may_fail:
            self._session.watch(self._actors)
