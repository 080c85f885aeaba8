"""The ranks of a model in Megatron: one Ray actor each, called together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.actor import ActorHandle

from megarl.cluster.placement import VISIBLE, Process
from megarl.cluster.rank_batch import RankBatch
from megarl.cluster.session import Session
from megarl.cluster.supervision.logs import log_to
from megarl.config.schema import Config, MegatronRole
from megarl.data.packing import Packing
from megarl.resharding.piece import Holder

if TYPE_CHECKING:
    from megarl.megatron.workers.model import ModelWorker


@dataclass(frozen=True, slots=True)
class Started:
    """What a rank says of itself: its data-parallel rank, what it holds of the model, how it packs, its kernels."""

    data_parallel_rank: int
    holder: Holder
    packing: Packing
    kernels: str


class RankActor:
    """Torch and Megatron are imported here, in the actor's own process, never in the driver's."""

    def __init__(self, config: Config, role: MegatronRole, model_folder: Path, process: Process, logs: Path):
        log_to(logs / f"{process.name}.log")
        os.environ.update(process.environment(os.environ.get(VISIBLE)))
        self._config, self._role, self._model_folder, self._process = config, role, model_folder, process

    def open_store(self) -> tuple[str, int]:
        """Rank 0 opens the store_address of the process group. Returns host and port."""
        from megarl.megatron import parallel

        host = ray.util.get_node_ip_address()
        world_size = self._config.placed(self._role).layout.world_size
        self._store = parallel.open_store(host, world_size, self._config.cluster.start_timeout_s)
        return host, self._store.port

    def start(self, host: str, port: int) -> Started:
        """Builds the model and loads its weights."""
        from megarl.megatron import parallel

        rank, world_size = self._process.index, self._config.placed(self._role).layout.world_size
        store = (
            self._store
            if rank == 0
            else parallel.join_store(host, port, world_size, self._config.cluster.start_timeout_s)
        )
        role_worker = worker_class(self._config, self._role)
        worker = role_worker(self._config, self._model_folder, rank, store, self._process.threads)
        self._worker: Any = worker
        return Started(worker.data_parallel_rank, worker.holder, worker.packing, worker.kernels)

    def close(self) -> None:
        self._worker.close()


def worker_class(config: Config, role: MegatronRole) -> type[ModelWorker]:
    from megarl.megatron.workers.actor import ActorWorker
    from megarl.megatron.workers.critic import CriticWorker
    from megarl.megatron.workers.implicit_reward import ImplicitRewardWorker
    from megarl.megatron.workers.preference import PreferenceWorker
    from megarl.megatron.workers.reward_model import RewardModelWorker

    if role == "actor" and config.trains_reward_model:
        return PreferenceWorker
    workers = (ActorWorker, CriticWorker, ImplicitRewardWorker, RewardModelWorker)
    return next(worker for worker in workers if worker.role == role)


class RankGroup:
    """All ranks of a role. Every method is one call on every rank and returns when all have answered."""

    actor_class: ClassVar[Any]
    """A class derived from RankActor, as a Ray actor."""

    def __init__(
        self, session: Session, config: Config, role: MegatronRole, model_folder: Path, processes: Sequence[Process]
    ):
        self._session, self._role = session, role
        self._start_timeout_s = config.cluster.start_timeout_s
        self._processes = processes
        self._actors = {
            process.name: self.actor_class.remote(config, role, model_folder, process, session.logs)
            for process in processes
        }
        session.watch(self._actors)
        self._data_parallel_ranks: list[int] = []
        self.holders: list[Holder] = []
        self.store_address = ("", 0)
        """Host and port of the ranks' TCPStore, which rank 0 has."""

    def start(self) -> None:
        first_name, first = next(iter(self._actors.items()))
        [(host, port)] = self._session.wait(
            {first_name: first.open_store.remote()}, f"{self._role} store_address", self._start_timeout_s
        )
        self.store_address = (host, port)
        started = self._session.wait(
            {name: actor.start.remote(host, port) for name, actor in self._actors.items()},
            f"{self._role} start",
            self._start_timeout_s,
        )
        self._data_parallel_ranks = [rank.data_parallel_rank for rank in started]
        ranks = zip(self._processes, started, strict=True)
        self.holders = [holder for process, rank in ranks for holder in process.hold([rank.holder])]
        self.packing, self.kernels = started[0].packing, started[0].kernels

    def close(self) -> None:
        """Leaves the process group together, so that no rank sees the others vanish."""
        self._session.wait({name: actor.close.remote() for name, actor in self._actors.items()}, f"{self._role} end")

    def _dealt(self, rank_batches: Sequence[RankBatch]) -> Iterator[tuple[str, ActorHandle, RankBatch]]:
        """Every rank with the batch of its data-parallel rank."""
        for (name, actor), rank in zip(self._actors.items(), self._data_parallel_ranks, strict=True):
            yield name, actor, rank_batches[rank]
