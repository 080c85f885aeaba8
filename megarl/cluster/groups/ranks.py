"""A model's Megatron ranks, each with its Ray actor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.groups.group import ProcessActor, WorkerGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.spares import SpareProcesses
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import FetchedBatches, RankBatch, Scores, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision.logs import log_to
from megarl.cluster.supervision.processes import ProcessId, kill
from megarl.config.model_schema import MegatronRole
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.collector import imports
from megarl.core.errors import RunFailure
from megarl.data.packing import Packing
from megarl.resharding.piece import Holder

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megarl.data.local_batch import LocalBatch
    from megarl.megatron.workers.model import ModelWorker


@dataclass(frozen=True, slots=True)
class Started:
    """A rank's report after it has built its model."""

    data_parallel_rank: int
    holder: Holder
    packing: Packing
    kernels: str
    process_id: ProcessId


class RankActor(ProcessActor):
    """One rank. Its worker is the role's class in megarl.megatron.workers."""

    def __init__(self, config: Config, role: MegatronRole, model_folder: Path, process: Process, logs: Path):
        super().__init__(process, logs)
        layout = config.placed(role).layout
        if layout.tp > 1 or layout.cp > 1:
            # Megatron overlaps these groups' communication with GEMMs by submission order, which a GPU preserves only
            # within one hardware queue. CUDA reads the variable when it creates the context.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self._config, self._model_folder = config, model_folder
        self._role: MegatronRole = role
        self._batches = FetchedBatches()

    def _receive(self, argument: Any) -> Any:
        """Fetch the LocalBatch if the argument is a RankBatch."""
        if not isinstance(argument, RankBatch):
            return argument
        return self._batches.fetch(argument, with_files=self._worker.has_tower)

    def prepare(self) -> None:
        """Prepare this spare process: import the worker's class and its dependencies. Raise RunFailure if the imports
        use device memory, because the current rank needs it."""
        with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
            thread.submit(self._import).result()
        if device.has_context():
            raise RunFailure(
                f"{self._process.name}: an import initialized CUDA, which takes device memory. Fix: set "
                "cluster.spare_processes=false, or remove the import"
            )
        print("ready to become a rank", flush=True)

    def _import(self) -> Callable[[Config, Path, int, Store, int], ModelWorker]:
        with imports():
            import megarl.cluster.store  # noqa: F401  # pyright: ignore[reportUnusedImport]

            return self._worker_class()

    def promote(self, process: Process, logs: Path) -> None:
        """Turn this spare process into a rank."""
        log_to(logs / f"{process.name}.log")
        self._process = process

    def open_store(self) -> tuple[str, int]:
        """Open the process group's TCPStore on rank 0, and return its host and port."""
        with imports():
            from megarl.cluster.store import open_store
        host = ray.util.get_node_ip_address()
        world_size = self._config.placed(self._role).layout.world_size
        self._store = open_store(host, world_size, self._config.cluster.timeouts.start)
        return host, self._store.port

    def start(self, host: str, port: int) -> Started:
        """Build the model and load its weights."""
        role_worker = self._import()
        from megarl.cluster.store import join_store

        rank, world_size = self._process.index, self._config.placed(self._role).layout.world_size
        timeout_s = self._config.cluster.timeouts.start
        store = self._store if rank == 0 else join_store(host, port, world_size, timeout_s)
        self._worker = worker = role_worker(self._config, self._model_folder, rank, store, self._process.threads)
        return Started(worker.data_parallel_rank, worker.holder, worker.packing, worker.kernels, ProcessId.own())

    def _worker_class(self) -> Callable[[Config, Path, int, Store, int], ModelWorker]:
        return worker_class(self._config, self._role)


class UntrainedRank(RankActor):
    """One rank of a model that only runs forward passes. Its worker is an UntrainedWorker."""

    def score_tokens(self, batch: LocalBatch) -> Scores:
        """Score samples without caching them for later passes."""
        self._batches.clear()
        return put_scores(self._worker.score_tokens(batch))


def worker_class(config: Config, role: MegatronRole) -> Callable[[Config, Path, int, Store, int], ModelWorker]:
    from megarl.megatron.workers.actor import ActorWorker
    from megarl.megatron.workers.classifier import ClassifierWorker
    from megarl.megatron.workers.critic import CriticWorker
    from megarl.megatron.workers.implicit_reward import ImplicitRewardWorker
    from megarl.megatron.workers.reward_model import RewardModelWorker
    from megarl.megatron.workers.teacher import TeacherWorker

    if role == "actor" and config.samples_images:
        from megarl.megatron.workers.denoiser import DenoiserWorker

        return DenoiserWorker
    if role == "actor" and config.trains_reward_model:
        return ClassifierWorker
    workers = (ActorWorker, CriticWorker, ImplicitRewardWorker, RewardModelWorker, TeacherWorker)
    return next(worker for worker in workers if worker.role == role)


def _lower_priority() -> None:
    """Give only this thread the lowest priority, because an unprivileged process could not raise it again."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@ray.remote(num_cpus=0, max_retries=0)
def _kill(ids: Sequence[ProcessId]) -> None:
    """Kill processes on this task's node."""
    kill(ids)


class RankGroup(WorkerGroup):
    """All ranks of one role."""

    actor_class: ClassVar[Any]
    """A class derived from RankActor, as a Ray actor."""

    def __init__(
        self,
        session: Session,
        config: Config,
        role: MegatronRole,
        model_folder: Path,
        processes: Sequence[Process],
        are_replaceable: bool = False,
    ):
        """are_replaceable: whether `kill` and `launch` replace the ranks if one of them is lost."""
        self._processes, self._are_replaceable = processes, are_replaceable
        self._arguments = config, role, model_folder
        super().__init__(session, role.replace("_", " "), {})
        self.num_launches = 0
        self._spares = SpareProcesses(processes, self._create_spare, session.logs)
        self.launch()
        self._process_ids: Mapping[Process, ProcessId] = {}
        self._data_parallel_ranks: list[int] = []
        self.holders: list[Holder] = []
        self.store_address = ("", 0)
        """Host and port of the ranks' TCPStore on rank 0."""

    @remote(timeout="start")
    def _open_store(self) -> tuple[str, int]: ...

    @remote(timeout="start")
    def _start(self, host: str, port: int) -> Started: ...

    @remote(timeout="start")
    def close(self) -> None:
        """Leave the process group on all ranks at once, because a rank that leaves alone looks like a crash to its
        peers."""

    @property
    def nodes(self) -> list[int]:
        """Each rank's node number."""
        return [process.node.number for process in self._processes]

    def launch(self) -> None:
        """Start the ranks, using spare processes that are ready."""
        self.num_launches += 1
        spares = self._spares.take()
        for process in self._processes:
            self._actors[process.name] = spares.get(process.name) or self._create(process)
        self._session.watch(self._actors, self._are_replaceable)

    def refill_spare_processes(self) -> None:
        """Start a spare process for each rank that has none, without waiting for it."""
        self._spares.refill()

    def _create(self, process: Process) -> ActorHandle:
        actor_class = self._session.on_node(self.actor_class, process)
        return actor_class.remote(*self._arguments, process, self._session.logs)

    def _create_spare(self, process: Process) -> ActorHandle:
        """Start a spare process for a rank, on the rank's node. It has its own name until it becomes the rank."""
        actor_class = self._session.on_node(self.actor_class, process)
        spare = replace(process, role=f"spare-{process.role}")
        return actor_class.remote(*self._arguments, spare, self._session.logs)

    def kill(self) -> None:
        """Kill the ranks' processes, including suspended ones that Ray cannot end, and wait until they are gone. Do not
        wait for processes on lost and dismissed nodes."""
        for actor in self._actors.values():
            ray.kill(actor)
        calls, lost = {}, self._session.members.lost()
        self._spares.drop([p.name for p in self._processes if p.node.number in lost])
        placed = {p.node.number: p for p in self._process_ids if p.node.number not in lost}
        for node in placed.values():
            ids = [process_id for process, process_id in self._process_ids.items() if process.node == node.node]
            task = _kill.options(scheduling_strategy=self._session.node_of(node))
            calls[f"node {node.node.number}"] = task.remote(ids)
        self._session.submit(calls, f"{self.role} kill", "start").result()
        self._process_ids = {}

    def start(self) -> Pending[None]:
        """Open the rendezvous on rank 0, then build the model on all ranks."""
        return self._open_store.on_first().then(lambda address: self._start_ranks(*address))

    def _start_ranks(self, host: str, port: int) -> Pending[None]:
        self.store_address = (host, port)
        print(f"{self.role}: rendezvous of the ranks at {host}:{port}", flush=True)
        return self._start(host, port).then(self._note_started)

    def _note_started(self, started: Sequence[Started]) -> None:
        self._process_ids = {p: rank.process_id for p, rank in zip(self._processes, started, strict=True)}
        self._data_parallel_ranks = [rank.data_parallel_rank for rank in started]
        ranks = zip(self._processes, started, strict=True)
        self.holders = [holder for process, rank in ranks for holder in process.hold([rank.holder])]
        self.packing, self.kernels = started[0].packing, started[0].kernels

    def _by_rank(self, batches: Sequence[RankBatch]) -> list[tuple[RankBatch]]:
        """Return each rank's arguments for a remote method: the batch of its data-parallel rank."""
        return [(batches[rank],) for rank in self._data_parallel_ranks]
