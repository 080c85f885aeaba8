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
from typing import Any, ClassVar, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.groups.group import ProcessActor
from megarl.cluster.groups.replicas import ReplicaActor, end_process
from megarl.cluster.network import LOOPBACK
from megarl.cluster.nodes.members import NODE_LOSS_S
from megarl.cluster.pending import outcome
from megarl.cluster.placement import Process
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.config.vllm_arguments import EngineSection
from megarl.core.collector import imports
from megarl.rollout.vllm.environment import environment
from megarl.rollout.vllm.refusal import refusal

Q = TypeVar("Q")
T = TypeVar("T")

CHECK_S = 0.5
"""Interval in seconds between checks by an engine's other parts that its first part is alive."""


class VllmActor(ReplicaActor):
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
        super().__init__(config, model_folder, process, other_nodes, logs)
        self._is_batch_invariant = self.is_batch_invariant(config)
        _prepare(process, self._is_batch_invariant)
        self._other_nodes = other_nodes
        self._others: dict[str, tuple[object, ray.ObjectRef]] = {}
        """The engine's other parts: actor handles, which keep the parts alive, and calls that run until the parts
        exit."""

    @staticmethod
    def is_batch_invariant(config: Config) -> bool:
        """Return whether the results for a sequence must not depend on the other sequences in its batch."""
        return False

    def start(self) -> None:
        """Start the engine as the actor's worker. Raise UserError if vLLM rejects the engine's arguments."""
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
        """Build the engine. Its attribute `has_lost_a_rank` becomes true when one of its ranks dies."""

    def _start_others(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Start the engine's other parts, if any. Return the engine arguments that the first part needs in addition."""
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

    @property
    def _is_lost(self) -> bool:
        """See ReplicaActor. Waits long enough for Ray to notice the exit of another part."""
        calls = [call for _, call in self._others.values()]
        return super()._is_lost or bool(calls and ray.wait(calls, num_returns=1, timeout=NODE_LOSS_S)[0])


@ray.remote(num_cpus=0, max_restarts=0)
class PartActor(ProcessActor):
    """An engine's ranks on one of its nodes after the first."""

    def __init__(self, process: Process, logs: Path, batch_invariant: bool):
        super().__init__(process, logs)
        _prepare(process, batch_invariant)

    @ray.method
    def serve(self, arguments: Mapping[str, Any]) -> str:
        """Start the ranks, and return an error message when one of them has died. Exit this process and its ranks as
        soon as the engine's first part has exited, because Ray would take half a minute longer to notice."""
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
