"""The ranks of a model in Megatron: one Ray actor each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import ray

from megarl.cluster.groups.group import Group, ProcessActor, TimedResult
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import FetchedBatches, RankBatch
from megarl.cluster.session import Session
from megarl.config.model_schema import MegatronRole
from megarl.config.schema import Config, TimeoutKind
from megarl.core.collector import imports
from megarl.data.packing import Packing
from megarl.resharding.piece import Holder

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch
    from megarl.megatron.workers.model import ModelWorker

W = TypeVar("W", bound="ModelWorker")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started:
    """The facts that a rank reports: its data-parallel rank, its holder of the model, its packing, its kernels."""

    data_parallel_rank: int
    holder: Holder
    packing: Packing
    kernels: str


class RankActor(ProcessActor):
    """One rank. Its worker is the role's class of megarl.megatron.workers."""

    def __init__(self, config: Config, role: MegatronRole, model_folder: Path, process: Process, logs: Path):
        super().__init__(process, logs)
        layout = config.placed(role).layout
        if layout.tp > 1 or layout.cp > 1:
            # Megatron overlaps these groups' communication with products by the order in which it submits both, which a
            # GPU keeps in one queue only. It reads the variable when its context is made.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self._config, self._role, self._model_folder = config, role, model_folder
        self._batches = FetchedBatches()

    def call(self, function: Callable[..., Any], *arguments: Any) -> TimedResult:
        """Runs function(worker, *arguments), with the LocalBatch in place of a RankBatch that refers to it."""
        return super().call(function, *map(self._fetched, arguments))

    def _fetched(self, argument: Any) -> Any:
        return self._batches.fetch(argument) if isinstance(argument, RankBatch) else argument

    def open_store(self) -> TimedResult:
        """Opens, on rank 0, the rendezvous of the process group. Answers with its host and port."""
        begin = time.time()
        with imports():
            from megarl.cluster.store import open_store
        host = ray.util.get_node_ip_address()
        world_size = self._config.placed(self._role).layout.world_size
        self._store = open_store(host, world_size, self._config.cluster.timeouts.start)
        return TimedResult((host, self._store.port), begin, time.time())

    def start(self, host: str, port: int) -> TimedResult:
        """Builds the model and loads its weights. Answers with a Started."""
        begin = time.time()
        with imports():
            from megarl.cluster.store import join_store

            role_worker = worker_class(self._config, self._role)
        rank, world_size = self._process.index, self._config.placed(self._role).layout.world_size
        timeout_s = self._config.cluster.timeouts.start
        store = self._store if rank == 0 else join_store(host, port, world_size, timeout_s)
        worker = role_worker(self._config, self._model_folder, rank, store, self._process.threads)
        self._worker = worker
        started = Started(worker.data_parallel_rank, worker.holder, worker.packing, worker.kernels)
        return TimedResult(started, begin, time.time())


def worker_class(config: Config, role: MegatronRole) -> type[ModelWorker]:
    from megarl.megatron.workers.actor import ActorWorker
    from megarl.megatron.workers.classifier import ClassifierWorker
    from megarl.megatron.workers.critic import CriticWorker
    from megarl.megatron.workers.implicit_reward import ImplicitRewardWorker
    from megarl.megatron.workers.reward_model import RewardModelWorker

    if role == "actor" and config.trains_reward_model:
        return ClassifierWorker
    workers = (ActorWorker, CriticWorker, ImplicitRewardWorker, RewardModelWorker)
    return next(worker for worker in workers if worker.role == role)


class RankGroup(Group[W]):
    """All ranks of a role."""

    actor_class: ClassVar[Any]
    """A class derived from RankActor, as a Ray actor."""
    title: ClassVar[str]
    """The name of that class."""

    def __init__(
        self, session: Session, config: Config, role: MegatronRole, model_folder: Path, processes: Sequence[Process]
    ):
        self._role = role
        self._processes = processes
        actors = {
            process.name: session.on_node(self.actor_class, process).remote(
                config, role, model_folder, process, session.logs
            )
            for process in processes
        }
        super().__init__(session, self.title, actors)
        session.watch(actors)
        self._data_parallel_ranks: list[int] = []
        self.holders: list[Holder] = []
        self.store_address = ("", 0)
        """Host and port of the ranks' TCPStore, which is on rank 0."""

    def start(self) -> Pending[None]:
        """Opens the rendezvous on rank 0, then builds the model on all ranks."""
        name, first = next(iter(self._actors.items()))
        opened = self._read(f"{self._role} rendezvous", "start", "open_store", {name: first.open_store.remote()})
        return opened.then(lambda addresses: self._start_ranks(*addresses[0]))

    def _start_ranks(self, host: str, port: int) -> Pending[None]:
        self.store_address = (host, port)
        print(f"{self._role.replace('_', ' ')}: its ranks meet at {host}:{port}", flush=True)
        calls = {name: actor.start.remote(host, port) for name, actor in self._actors.items()}
        return self._read(f"{self._role} start", "start", "start", calls).then(self._note_started)

    def _note_started(self, started: Sequence[Started]) -> None:
        self._data_parallel_ranks = [rank.data_parallel_rank for rank in started]
        ranks = zip(self._processes, started, strict=True)
        self.holders = [holder for process, rank in ranks for holder in process.hold([rank.holder])]
        self.packing, self.kernels = started[0].packing, started[0].kernels

    def close(self) -> Pending[list[None]]:
        """Makes all ranks leave the process group together, so that no rank sees the others vanish."""
        return self._submit(f"{self._role} end", "start", "close", lambda worker: worker.close())

    def _submit_batches(
        self,
        phase: str,
        limit: TimeoutKind,
        task: str,
        function: Callable[[W, LocalBatch], T],
        batches: Sequence[RankBatch],
    ) -> Pending[list[T]]:
        """Runs function(worker, batch) in every rank, with the LocalBatch of its data-parallel rank's batch."""
        return self._submit_each(phase, limit, task, function, [(batches[rank],) for rank in self._data_parallel_ranks])
