"""Engines on vLLM: one Ray actor per engine or, if an engine spans several nodes, one per node.

The first actor is the engine. It starts the remaining actors. If any of these actors exits, all of them exit.
"""

from __future__ import annotations

import os
import tempfile
import threading
from abc import abstractmethod
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
from megarl.cluster.network import LOOPBACK
from megarl.cluster.nodes.gathering import NODE_LOSS_S
from megarl.cluster.pending import Answers, Pending, outcome
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.config.vllm_arguments import EngineSection
from megarl.core.collector import imports
from megarl.core.errors import RunFailure
from megarl.rollout.router import Abort, Aborted, Router, Submission
from megarl.rollout.vllm.environment import environment
from megarl.rollout.vllm.refusal import refusal

Q = TypeVar("Q")
T = TypeVar("T")

CHECK_S = 0.5
"""Interval in seconds at which an engine's other parts check that its first part is alive."""


class VllmActor(ProcessActor):
    """One engine. It sets its environment variables before it imports vLLM."""

    section: ClassVar[EngineSection]
    """Section of the config with the engine's settings."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        process: Process,
        other_nodes: Sequence[NodeAffinitySchedulingStrategy],
        logs: Path,
    ):
        """other_nodes: one scheduling strategy for each additional part of the engine, in order."""
        super().__init__(process, logs)
        self._is_batch_invariant = self.is_batch_invariant(config)
        _prepare(process, self._is_batch_invariant)
        self._config, self._model_folder, self._other_nodes, self._logs = config, model_folder, other_nodes, logs
        self._others: dict[str, tuple[object, ray.ObjectRef]] = {}
        """Actor handles, which keep the engine's other parts alive, each with a call that runs until the part exits."""

    @staticmethod
    def is_batch_invariant(config: Config) -> bool:
        """Return whether the results for a sequence must not depend on the other sequences in its batch."""
        return False

    def call(self, method: str, *arguments: Any) -> TimedResult:
        with self._end_if_rank_died():
            return super().call(method, *arguments)

    def start(self) -> None:
        """Start the engine, which is the actor's worker. Raise UserError if vLLM rejects the engine's arguments."""
        with imports():
            arguments = self._arguments()
        arguments = arguments | self._start_others(arguments)
        try:
            self._worker = self._load(arguments)
        except (ValueError, NotImplementedError) as error:
            rejected = refusal(error, self.section, getattr(self._config, self.section).vllm_overrides)
            if rejected is None:
                raise
            raise rejected from error
        segments.note(own_scratch())

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Import vLLM and return the engine arguments."""

    @abstractmethod
    def _load(self, arguments: Mapping[str, Any]) -> Any:
        """Build the engine. Its attribute `has_lost_a_rank` is true once one of its ranks has died."""

    def _start_others(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Start the engine's other parts. Return the engine arguments for the first part."""
        parts = self._process.parts
        if len(parts) == 1:
            return {}
        from megarl.cluster.store import open_store
        from megarl.rollout.vllm.part import part_arguments, set_rendezvous_address

        host = ray.util.get_node_ip_address()
        set_rendezvous_address(host)
        self._store = open_store(host, None, self._config.cluster.timeouts.start)
        print(f"{self._process.name}: rendezvous of its parts at {host}:{self._store.port}", flush=True)
        first, *others = [part_arguments(part.part_number, len(parts), host, self._store.port) for part in parts]
        for process, node, overrides in zip(self._process.rest, self._other_nodes, others, strict=True):
            actor = PartActor.options(scheduling_strategy=node).remote(process, self._logs, self._is_batch_invariant)
            self._others[process.name] = actor, actor.serve.remote(dict(arguments) | overrides)
        threading.Thread(target=self._end_with_others, name="other parts", daemon=True).start()
        return first

    def _end_with_others(self) -> None:
        """Exit this process as soon as one of the engine's other parts has exited."""
        calls = {call: name for name, (_, call) in self._others.items()}
        [finished], _ = ray.wait(list(calls), num_returns=1)
        value, error = outcome(finished)
        print(f"{calls[finished]}: {value if error is None else error}. Stopping the engine", flush=True)
        end_process()

    @contextmanager
    def _end_if_rank_died(self) -> Iterator[None]:
        """If the body raises and one of the engine's ranks has died, exit this process, because the engine is lost."""
        try:
            yield
        except Exception:
            if self._worker is not None and (self._worker.has_lost_a_rank or self._has_lost_a_part()):
                end_process()
            raise

    def _has_lost_a_part(self) -> bool:
        """Return whether one of the engine's other parts has exited. Wait long enough for Ray to notice an exit."""
        calls = [call for _, call in self._others.values()]
        return bool(calls and ray.wait(calls, num_returns=1, timeout=NODE_LOSS_S)[0])


@ray.remote(num_cpus=0, max_restarts=0)
class PartActor(ProcessActor):
    """An engine's ranks on a node other than the engine's first node."""

    def __init__(self, process: Process, logs: Path, batch_invariant: bool):
        super().__init__(process, logs)
        _prepare(process, batch_invariant)

    @ray.method
    def serve(self, arguments: Mapping[str, Any]) -> str:
        """Start the ranks, and return an error message when a rank has died. Exit this process and its ranks as soon as
        the engine's first part has exited, because Ray would take half a minute longer to do so."""
        with imports():
            from megarl.cluster.store import is_open, join_store
            from megarl.rollout.vllm.part import PartRanks, set_rendezvous_address
        set_rendezvous_address(ray.util.get_node_ip_address())
        ranks = PartRanks(arguments)
        segments.note(own_scratch())
        store = join_store(arguments["master_addr"], arguments["master_port"], None, NODE_LOSS_S)
        while not ranks.died.wait(CHECK_S):
            if not is_open(store):
                end_process()
        return f"a rank died. See {self._process.name}.log"


def end_process() -> None:
    """Exit this process and terminate the engine's ranks on this node, because the engine is lost."""
    processes.end_descendants()
    os._exit(1)


def _prepare(process: Process, batch_invariant: bool) -> None:
    """Set the variables that vLLM reads on import. Its files and semaphores go to the run's scratch folder."""
    scratch = own_scratch()
    # By default, vLLM leaves its processes' sockets and its ranks' rendezvous files behind.
    folders = {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
    os.environ["VLLM_HOST_IP"] = LOOPBACK  # an engine on several nodes overrides it; see set_rendezvous_address
    ranks = len(process.devices)
    variables = environment(ranks, process.threads, process.index, bool(process.gpus), batch_invariant)
    os.environ.update(variables, **folders)
    tempfile.tempdir = None  # tempfile cached the old TMPDIR when Ray imported it
    segments.name_semaphores(scratch)


class VllmGroup(WorkerGroup):
    """All engines in one role. All work for one prompt goes to the least-loaded engine, where it shares a prefix
    cache. When an engine is lost, the remaining engines take over its work while it restarts."""

    actor_class: ClassVar[Any]
    """A class derived from VllmActor, as a Ray actor."""
    role: str
    awaits_restarts: ClassVar[bool]
    """Whether work waits for a restarting engine if no other engine is left. Set it only for engines that start with
    their weights."""

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
        """If the loss of any engine would end the run, watch the engines, so that a loss interrupts every wait.
        Otherwise, a loss fails only the calls to the lost engine."""
        self._session.unwatch(self._processes)
        if not self.may_fail:
            self._session.watch(self._actors)
