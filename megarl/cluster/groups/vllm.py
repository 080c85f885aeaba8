"""Engines on vLLM: one Ray actor per engine or, if an engine spans several nodes, one per node.

The first actor is the engine. It starts the remaining actors. If any of these actors exits, all of them exit.
"""

from __future__ import annotations

import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.groups.group import ProcessActor, WorkerGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.network import LOOPBACK
from megarl.cluster.nodes.gathering import VERDICT_S
from megarl.cluster.pending import Pending, outcome
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.core.collector import imports
from megarl.rollout.vllm.environment import environment

CHECK_S = 0.5
"""Interval in seconds at which an engine's other parts check that its first part is alive."""


class VllmActor(ProcessActor):
    """One engine. It sets its environment variables before it imports vLLM."""

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
        """Handles that keep the actors of the engine's other parts alive, each with a call that runs as long."""

    @staticmethod
    def is_batch_invariant(config: Config) -> bool:
        """Return whether the results for a sequence must not depend on the other sequences in its batch."""
        return False

    def start(self) -> None:
        """Start the engine, which is the actor's worker."""
        with imports():
            arguments = self._arguments()
        self._worker = self._load(arguments | self._start_others(arguments))
        segments.note(own_scratch())

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Import vLLM and return the engine arguments."""

    @abstractmethod
    def _load(self, arguments: Mapping[str, Any]) -> Any:
        """Build the engine."""

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
        for process, node, own in zip(self._process.rest, self._other_nodes, others, strict=True):
            actor = PartActor.options(scheduling_strategy=node).remote(process, self._logs, self._is_batch_invariant)
            self._others[process.name] = actor, actor.serve.remote(dict(arguments) | own)
        threading.Thread(target=self._end_with_others, name="other parts", daemon=True).start()
        return first

    def _end_with_others(self) -> None:
        """Exit this process as soon as one of the engine's other parts has exited."""
        calls = {call: name for name, (_, call) in self._others.items()}
        [finished], _ = ray.wait(list(calls), num_returns=1)
        value, error = outcome(finished)
        print(f"{calls[finished]}: {value if error is None else error}. Stopping the engine", flush=True)
        end_process()

    def _has_lost_a_part(self) -> bool:
        """Return whether one of the engine's other parts has exited. Wait long enough for Ray to notice an exit."""
        calls = [call for _, call in self._others.values()]
        return bool(calls and ray.wait(calls, num_returns=1, timeout=VERDICT_S)[0])


@ray.remote(num_cpus=0, max_restarts=0)
class PartActor(ProcessActor):
    """An engine's ranks on one node, except on the engine's first node."""

    def __init__(self, process: Process, logs: Path, batch_invariant: bool):
        super().__init__(process, logs)
        _prepare(process, batch_invariant)

    @ray.method
    def serve(self, arguments: Mapping[str, Any]) -> str:
        """Start the ranks, and return an error message when a rank has died. End this process and its ranks as soon as
        the engine's first part is gone, because Ray would take half a minute longer to do so."""
        with imports():
            from megarl.cluster.store import is_open, join_store
            from megarl.rollout.vllm.part import PartRanks, set_rendezvous_address
        set_rendezvous_address(ray.util.get_node_ip_address())
        ranks = PartRanks(arguments)
        segments.note(own_scratch())
        store = join_store(arguments["master_addr"], arguments["master_port"], None, VERDICT_S)
        while not ranks.died.wait(CHECK_S):
            if not is_open(store):
                end_process()
        return f"a rank died. See {self._process.name}.log"


def end_process() -> None:
    """End this process and the engine's ranks on this node because the engine is lost."""
    processes.end_descendants()
    os._exit(1)


def _prepare(process: Process, batch_invariant: bool) -> None:
    """Set the variables that vLLM reads on import. Its files and semaphores go to the run's scratch folder."""
    scratch = own_scratch()
    # By default, vLLM leaves its processes' sockets and its ranks' rendezvous files behind.
    folders = {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
    os.environ["VLLM_HOST_IP"] = LOOPBACK  # an engine on several nodes changes it; see set_rendezvous_address
    ranks = len(process.devices)
    variables = environment(ranks, process.threads, process.index, bool(process.gpus), batch_invariant)
    os.environ.update(variables, **folders)
    tempfile.tempdir = None  # tempfile cached the old TMPDIR when Ray imported it
    segments.name_semaphores(scratch)


class VllmGroup(WorkerGroup):
    """All engines in one role."""

    actor_class: ClassVar[Any]
    """A class derived from VllmActor, as a Ray actor."""
    role: str

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process]):
        def launch(process: Process) -> ActorHandle:
            actor, other_nodes = session.on_node(self.actor_class, process), map(session.node_of, process.rest)
            return actor.remote(config, model_folder, process, list(other_nodes), session.logs)

        self._launch = launch
        self._processes = {process.name: process for process in processes}
        super().__init__(session, self.role, {process.name: launch(process) for process in processes})
        self._watch()

    @remote(timeout="start")
    def _start(self) -> None: ...

    def start(self) -> Pending[Any]:
        return self._start()

    def _watch(self) -> None:
        """Make the loss of an engine end the run."""
        self._session.watch(self._actors)
