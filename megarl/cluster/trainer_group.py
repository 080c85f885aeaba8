"""The ranks of a model that the run trains: one Ray actor each, called together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from megarl.batch import GroupStatistics, Sample, TrainingSample
from megarl.checkpoints import Checkpoint, FileRecord
from megarl.cluster.logs import log_to
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.config.schema import Config, Role
from megarl.data.packing import Microbatch, Packing
from megarl.metrics import Metric, merge
from megarl.resharding.piece import Holder

if TYPE_CHECKING:
    import torch

    from megarl.megatron.actor_worker import Scorer
    from megarl.megatron.worker import TrainerWorker
    from megarl.resharding.plan import Plan
    from megarl.resharding.transports.shared_memory import PublishedParameter, SharedMemory


Values = dict[str, ray.ObjectRef]
"""Sample id -> where its critic's values are, one per response token."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One sample of an update, as the driver hands it out: where its tokens and its values are (None: it has none), and
    the scalars beside them."""

    sample: ray.ObjectRef
    reward: float
    group: GroupStatistics
    weight: float
    values: ray.ObjectRef | None = None

    def fetch(self) -> TrainingSample:
        return self.training_sample(ray.get(self.sample), None if self.values is None else ray.get(self.values))

    def training_sample(self, sample: Sample, values: torch.Tensor | None = None) -> TrainingSample:
        return TrainingSample(sample, self.reward, self.group, self.weight, values)


@dataclass(frozen=True, slots=True)
class Share:
    """What one data-parallel rank does of an update; microbatches index into its samples."""

    samples: tuple[Assignment, ...]
    microbatches: tuple[Microbatch, ...]

    @classmethod
    def of(cls, assignments: Sequence[Assignment], microbatches: Sequence[Microbatch]) -> Share:
        """microbatches index into the whole update; the share keeps only the samples that they name."""
        own = sorted(index for microbatch in microbatches for index in microbatch)
        position = {index: i for i, index in enumerate(own)}
        return cls(
            samples=tuple(assignments[index] for index in own),
            microbatches=tuple(tuple(position[index] for index in members) for members in microbatches),
        )


@dataclass(frozen=True, slots=True)
class Started:
    """What a rank says of itself: its data-parallel rank, what it holds of the model, how it packs, its kernels."""

    data_parallel_rank: int
    holder: Holder
    packing: Packing
    kernels: str


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor:
    """Torch and Megatron are imported here, in the actor's own process, never in the driver's."""

    def __init__(self, config: Config, role: Role, model_folder: Path, process: Process, logs: Path):
        log_to(logs / f"{process.name}.log")
        self._config, self._role, self._model_folder, self._process = config, role, model_folder, process

    def open_store(self) -> tuple[str, int]:
        """Rank 0 opens the rendezvous of the process group. Returns host and port."""
        from megarl.megatron import parallel

        host = ray.util.get_node_ip_address()
        self._store = parallel.open_store(
            host, self._config.trained(self._role).layout.world_size, self._config.cluster.start_timeout_s
        )
        return host, self._store.port

    def start(self, host: str, port: int) -> Started:
        """Builds the model and loads its weights."""
        from megarl.megatron import parallel

        rank, world_size = self._process.index, self._config.trained(self._role).layout.world_size
        store = (
            self._store
            if rank == 0
            else parallel.join_store(host, port, world_size, self._config.cluster.start_timeout_s)
        )
        role_worker = worker_class(self._role)
        self._worker = role_worker(self._config, self._model_folder, rank, store, self._process.threads)
        worker = self._worker
        return Started(worker.data_parallel_rank, worker.holder, worker.packing, worker.kernels)

    def publish(self) -> dict[str, PublishedParameter]:
        return self._worker.publish()

    def score(self, scorer: Scorer, share: Share) -> None:
        self._worker.score(scorer, [item.fetch() for item in share.samples], share.microbatches)

    def values(self, share: Share) -> Values:
        """Puts the values of each sample where they can be fetched by reference."""
        values = self._worker.values([item.fetch() for item in share.samples], share.microbatches)
        return {sample: ray.put(value) for sample, value in values.items()}

    def update(self, share: Share) -> dict[str, Metric]:
        return self._worker.update([item.fetch() for item in share.samples], share.microbatches)

    def end_step(self) -> None:
        self._worker.end_step()

    def offload(self) -> dict[str, Metric]:
        return self._worker.offload()

    def onload(self) -> None:
        self._worker.onload()

    def export(self, plan: Plan, transport: SharedMemory, out: Path) -> None:
        self._worker.export(plan, transport, out)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._worker.check_checkpoint(checkpoint, self._role)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._worker.load_checkpoint(checkpoint, self._role)

    def save_checkpoint(self, checkpoint: Path) -> None:
        self._worker.save_checkpoint(checkpoint, self._role)

    def checkpoint_written(self) -> bool:
        return self._worker.checkpoint_written()

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        return self._worker.finish_checkpoint(checkpoint)

    def close(self) -> None:
        self._worker.close()


def worker_class(role: Role) -> type[TrainerWorker]:
    from megarl.megatron.actor_worker import ActorWorker
    from megarl.megatron.critic_worker import CriticWorker

    return {"actor": ActorWorker, "critic": CriticWorker}[role]


class TrainerGroup:
    """All ranks of a role. Every method is one call on every rank and returns when all have answered."""

    def __init__(self, session: Session, config: Config, role: Role, model_folder: Path, processes: Sequence[Process]):
        self._session, self._role = session, role
        self.offloads = bool(config.trained(role).offload)
        self._start_timeout_s = config.cluster.start_timeout_s
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        self._actors = {
            process.name: TrainerActor.options(num_gpus=gpus).remote(config, role, model_folder, process, session.logs)
            for process in processes
        }
        session.watch(self._actors)
        self._data_parallel_ranks: list[int] = []
        self.holders: list[Holder] = []

    def start(self) -> None:
        first_name, first = next(iter(self._actors.items()))
        [(host, port)] = self._session.wait(
            {first_name: first.open_store.remote()}, f"{self._role} rendezvous", self._start_timeout_s
        )
        started = self._session.wait(
            {name: actor.start.remote(host, port) for name, actor in self._actors.items()},
            f"{self._role} start",
            self._start_timeout_s,
        )
        self._data_parallel_ranks = [rank.data_parallel_rank for rank in started]
        self.holders = [rank.holder for rank in started]
        self.packing, self.kernels = started[0].packing, started[0].kernels

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError that names a damaged file, before any rank reads more than its checksum."""
        checks = {name: actor.check_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(checks, f"{self._role}: checksums of the checkpoint")
        calls = {name: actor.load_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: loading the checkpoint")

    def publish(self) -> dict[str, dict[str, PublishedParameter]]:
        """By holder name: where each live parameter lies in shared memory."""
        published = self._session.wait(
            {name: actor.publish.remote() for name, actor in self._actors.items()}, "publishing weights"
        )
        return {holder.name: parameters for holder, parameters in zip(self.holders, published, strict=True)}

    def score(self, scorer: Scorer, shares: Sequence[Share]) -> None:
        """shares: by data-parallel rank."""
        calls = {name: actor.score.remote(scorer, share) for name, actor, share in self._dealt(shares)}
        self._session.wait(calls, f"{scorer} log-probs")

    def values(self, shares: Sequence[Share]) -> Values:
        """The critic's, of every sample; shares: by data-parallel rank."""
        calls = {name: actor.values.remote(share) for name, actor, share in self._dealt(shares)}
        answers = self._session.wait(calls, "critic values")
        return {sample: ref for answer in answers for sample, ref in answer.items()}

    def update(self, shares: Sequence[Share]) -> Mapping[str, Metric]:
        """One optimizer step; shares: by data-parallel rank. Returns metrics over all ranks."""
        calls = {name: actor.update.remote(share) for name, actor, share in self._dealt(shares)}
        return merge(self._session.wait(calls, f"{self._role} update"))

    def end_step(self) -> None:
        calls = {name: actor.end_step.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, "end of step")

    def offload(self) -> Mapping[str, Metric]:
        """Makes room on the devices, until `onload`. Returns by how much, over all ranks."""
        calls = {name: actor.offload.remote() for name, actor in self._actors.items()}
        return merge(self._session.wait(calls, f"{self._role}: to host memory"))

    def onload(self) -> None:
        calls = {name: actor.onload.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: back from host memory")

    def export(self, plan: Plan, transport: SharedMemory, out: Path) -> None:
        """The first rank writes the whole model, a few tensors at a time."""
        name, actor = next(iter(self._actors.items()))
        self._session.wait({name: actor.export.remote(plan, transport, out)}, "export")

    def save_checkpoint(self, checkpoint: Path) -> None:
        """Returns when all ranks have copied what they will write, into a folder of the role in this one."""
        (checkpoint / self._role).mkdir()
        calls = {name: actor.save_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: copy for the checkpoint")

    def checkpoint_written(self) -> bool:
        """Whether all ranks have written their files, or failed to."""
        calls = {name: actor.checkpoint_written.remote() for name, actor in self._actors.items()}
        return all(self._session.wait(calls, f"{self._role}: state of the checkpoint"))

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        """The files of all ranks, once they are on the disk."""
        calls = {name: actor.finish_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        answers = self._session.wait(calls, f"{self._role}: writing the checkpoint")
        return [record for records in answers for record in records]

    def close(self) -> None:
        """Leaves the process group together, so that no rank sees the others vanish."""
        self._session.wait({name: actor.close.remote() for name, actor in self._actors.items()}, f"{self._role} end")

    def _dealt(self, shares: Sequence[Share]) -> Iterator[tuple[str, ActorHandle, Share]]:
        """Every rank with the share of its data-parallel rank."""
        for (name, actor), rank in zip(self._actors.items(), self._data_parallel_ranks, strict=True):
            yield name, actor, shares[rank]
