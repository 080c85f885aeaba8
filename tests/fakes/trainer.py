"""A trainer rank without Megatron that starts in a second.

It holds the rank's shard, sends it to engines over the real transports, and saves and copies it. An update is a
collective over all ranks, and multiplies the weights by a negative factor that depends on the samples' tokens and
rewards.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megarl.cluster.groups.trainers import TrainerRank
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, seal, write_note
from megarl.core.metrics import Metric
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Packing
from megarl.models.folder import read_config
from megarl.models.token_cost import TokenCost
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports import shared_memory
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.published import Published
from megarl.resharding.transports.rank_files import write_parameters
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.transport import Transport
from megarl.resharding.verification import Checksum, Region, source_checksums

FACTORS, UNIT = 1009, 1e-5
"""Number of factors by which weights are multiplied, and their spacing. They are close to -1, so that every update
changes even bfloat16 weights, but thousands of updates hardly change their magnitudes."""

METRICS = ("policy/loss", "policy/grad_norm", "policy/lr")
"""Metrics of an update. The value of each is the magnitude of the factor."""


class FakeTrainer:
    """A stand-in for TrainerWorker with the methods that a GRPO run with one update per step calls."""

    kernels = "a trainer without Megatron"
    has_tower = False

    def __init__(self, role: Role, config: Config, folder: Path, rank: int, store: Store):
        self._role, self._folder, self._rank = role, folder, rank
        settings, self._hf_config = config.placed(role), read_config(folder)
        layout = settings.layout
        timeout = timedelta(seconds=config.cluster.timeouts.longest)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
        self.data_parallel_rank = rank // (layout.tp * layout.cp) % layout.dp
        self._reports = rank < layout.world_size // layout.pp and rank % (layout.tp * layout.cp) == 0
        cost = TokenCost.of_model(self._hf_config)
        self.packing = Packing(settings.tokens_per_microbatch, layout.dp, False, 1, 1, 1, cost)
        self.holder = megatron_holder(self._hf_config, layout, rank, dtype=config.model.dtype)
        self._weights = {
            name: torch.zeros(shape, dtype=getattr(torch, self.holder.dtypes[name]))
            for name, shape in self.holder.shapes.items()
        }
        with SafetensorsFolder(folder) as transport:
            source = transport.with_file_dtypes(huggingface_holder(self._hf_config))
            execute(make_plan([source], [self.holder]).into(self.holder.name), self._weights, transport)

    def update(self, batch: LocalBatch) -> dict[str, Metric]:
        total = torch.tensor(sum(map(self._digest, batch.samples)) if self._reports else 0)
        dist.all_reduce(total)
        factor = 1 + UNIT * (int(total) % FACTORS - FACTORS // 2)
        for weight in self._weights.values():
            weight.mul_(-factor)
        return {name: Metric(factor) for name in METRICS} if self._reports else {}

    @staticmethod
    def _digest(item: Any) -> int:
        return zlib.crc32(item.sample.response_ids.tobytes() + repr(item.outcome).encode())

    def end_epoch(self) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def prepare_refit(self) -> None:
        """Do nothing."""

    def take_advantages(self) -> dict[str, float]:
        return {}

    def take_token_details(self) -> dict[str, dict[str, list[float]]]:
        return {}

    def publish(self, for_refit: bool) -> Published:
        return shared_memory.publish(self._weights)

    def connect(self, plan: Plan, rendezvous: Rendezvous) -> None:
        self._transport = rendezvous.open(self.holder.name, self._weights, plan)

    def send(self) -> int:
        return self._transport.send()

    def checksums(self, wanted: Sequence[Region], plan: Plan) -> dict[Region, Checksum]:
        return source_checksums(wanted, plan, self.holder.name, self._weights)

    def export(self, plan: Plan, transport: Transport, out: Path) -> None:
        write_folder(plan, transport, self._hf_config, self._folder, out)

    def write_part(self, plan: Plan, folder: Path) -> None:
        names = sorted({move.source.parameter for move in plan.moves_from(self.holder.name)})
        write_parameters(self._weights, names, folder)

    def copy_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    def copy_state(self, step: int, folder: Path) -> None:
        self._write_copy(self._rank, self._weights, step, folder)

    def wait_for_copy(self) -> None:
        """Do nothing, because `copy_state` returns a complete copy."""

    def finish_copies(self, waits: bool) -> tuple[str, str]:
        return "", ""

    def discard_copies(self, folder: Path) -> None:
        """Do nothing, because a new copy overwrites an old one."""

    def start_delivery(self, step: int, folder: Path, keepers: Sequence[int]) -> None:
        """Deliver the copy to all ranks."""
        for rank, weights in enumerate(self._gathered(self._weights)):
            if rank != self._rank:
                self._write_copy(rank, weights, step, folder)

    def _write_copy(self, rank: int, weights: Mapping[str, torch.Tensor], step: int, folder: Path) -> None:
        self._copy(rank, step - 2, folder).unlink(missing_ok=True)
        hidden = folder / f"{self._role}-{self._rank}.{rank}.new"
        torch.save(weights, hidden)
        hidden.rename(self._copy(rank, step, folder))

    def restore_state(self, step: int, folder: Path, keepers: Sequence[int]) -> None:
        files = {rank: self._copy(rank, step, folder) for rank in range(dist.get_world_size())}
        held = self._gathered({rank: _loaded(file) for rank, file in files.items() if file.exists()})
        self._set_weights(next(states[self._rank] for states in held if self._rank in states))

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _copy(self, rank: int, step: int, folder: Path) -> Path:
        return folder / f"{self._role}-{rank}.{step}"

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint.verify(record for record in checkpoint.files if record.path.startswith(f"{self._role}/"))

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._set_weights(_loaded(self._file(checkpoint.path)))

    def save_checkpoint(self, checkpoint: Path) -> None:
        file = self._file(checkpoint)
        torch.save(self._weights, file)
        record = seal(file, file.parent)
        write_note(file.parent, self._rank, [record])
        self._record = seal(file, checkpoint)

    def checkpoint_written(self) -> bool:
        return True

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        return [self._record]

    def _file(self, checkpoint: Path) -> Path:
        return checkpoint / self._role / f"__{self._rank}_0.distcp"

    def _set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(weights[name])

    def close(self) -> None:
        dist.destroy_process_group()


def _loaded(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, weights_only=True)


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor(TrainerRank):
    """The actor of a FakeTrainer. Its process has the same title as one with Megatron."""

    def _worker_class(self) -> Any:
        role = self._role

        def build(config: Config, folder: Path, rank: int, store: Store, threads: int) -> FakeTrainer:
            torch.set_num_threads(threads)
            return FakeTrainer(role, config, folder, rank, store)

        return build
