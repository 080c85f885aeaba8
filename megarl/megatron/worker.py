"""One rank of a model that the run trains: its shard and its optimizer. Each role derives a class of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from megarl import device
from megarl.batch import TokenBatch, TrainingSample
from megarl.checkpoints import Checkpoint, FileRecord
from megarl.config.classifier import BIAS, WEIGHT
from megarl.config.learning_rate import learning_rate
from megarl.config.schema import Config, Role
from megarl.data.collate import collate
from megarl.data.model_folder import read_config
from megarl.data.packing import Microbatch
from megarl.megatron import kernels, parallel, sharded_checkpoint, step
from megarl.megatron.advantage import with_advantages
from megarl.megatron.layer_spec import uses_transformer_engine
from megarl.megatron.model import VOCABULARY_MULTIPLE, build_model, named_parameters, named_weights
from megarl.megatron.offload import Offload
from megarl.megatron.optimizer import build_optimizer, set_rates
from megarl.megatron.packing import packing_of
from megarl.megatron.sums import Sums
from megarl.metrics import Metric
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.piece import Holder
from megarl.resharding.plan import Plan, make_plan
from megarl.resharding.selection import select_tensors, whole_parameters
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.shared_memory import PublishedParameter, publish
from megarl.resharding.transports.transport import Transport


class TrainerWorker(ABC):
    """Samples come and go as `Sample`s; tensors made from them stay here.

    A role says which model it is, what it computes of samples in a forward-only pass, and what it is trained on.
    """

    role: Role
    metrics: str
    """The first part of its metrics' names."""

    def __init__(
        self,
        config: Config,
        hf_config: Mapping[str, Any],
        model_folder: Path,
        rank: int,
        store: Store,
        threads: int,
    ):
        """hf_config: of the role's model, which may differ from that of the folder by its head."""
        self._config, self._settings, self._hf_config = config, config.trained(self.role), hf_config
        self._folder, self._rank = model_folder, rank
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        """What passes gave for the samples of this step: name as in TokenBatch -> sample id -> float32 [R]."""
        settings = self._settings
        self.packing = packing_of(settings, hf_config)
        dtype = getattr(torch, config.model.dtype)
        device.claim(threads)
        parallel.initialize(settings.layout, store, rank, config.run.seed, timeout_s=config.cluster.step_timeout_s)
        self.chunks = build_model(
            settings,
            hf_config,
            dtype,
            config.rollout.temperature,
            config.rollout.context_length,
            frozen=self._chosen("frozen", settings.frozen),
        )
        self._load_weights()
        undecayed = self._chosen("optimizer.no_weight_decay", settings.optimizer.no_weight_decay)
        named = named_parameters(self.chunks)
        self.optimizer = build_optimizer(settings, self.chunks, dtype, [named[name] for name in undecayed])
        self._offload = Offload(self.chunks, self.optimizer)
        self.kernels = kernels.describe()
        print(f"{settings.section}: {self.kernels}", flush=True)
        self.num_updates = 0
        """Optimizer steps done; the learning rate follows from it."""
        self._saving: sharded_checkpoint.Saving | None = None

    @abstractmethod
    def objective(self, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """See megarl.megatron.objective.Objective."""

    @property
    def holder(self) -> Holder:
        return megatron_holder(
            self._hf_config,
            self._settings.layout,
            self._rank,
            transformer_engine=uses_transformer_engine(),
            vocab_multiple=VOCABULARY_MULTIPLE,
        )

    @property
    def data_parallel_rank(self) -> int:
        return parallel.data_parallel_rank()

    def parameters(self) -> dict[str, torch.Tensor]:
        return named_weights(self.chunks)

    def publish(self) -> dict[str, PublishedParameter]:
        """Moves the live parameters into shared memory, where an engine on this machine reads them from now on."""
        return publish(self.parameters())

    def update(self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]) -> dict[str, Metric]:
        """One optimizer step. Returns metrics on the ranks that report for their replica, nothing on the others."""
        batches = self._training_batches(samples, microbatches)
        optimizer = self._settings.optimizer
        rate = learning_rate(optimizer, self.num_updates, self._config.num_updates(self._settings))
        set_rates(self.optimizer, rate, optimizer.weight_decay)
        metrics, grad_norm = step.update(self.chunks, self.optimizer, self.objective, batches)
        self.num_updates += 1
        metrics[f"{self.metrics}/grad_norm"] = Metric(grad_norm)
        metrics[f"{self.metrics}/lr"] = Metric(rate)
        return metrics if parallel.reports_metrics() else {}

    def offload(self) -> dict[str, Metric]:
        """Moves what the section's key `offload` names to host memory, until `onload`."""
        num_bytes = sum(self._offload.move_out(part) for part in sorted(set(self._settings.offload)))
        return {f"memory/{self._settings.section}_offloaded_gb": Metric(num_bytes / 1e9, reduction="sum")}

    def onload(self) -> None:
        for part in set(self._settings.offload):
            self._offload.move_in(part)

    def end_step(self) -> None:
        """Its samples do not come back, and whoever reads the parameters now finds them complete."""
        step.gather_parameters(self.chunks)
        self._kept.clear()

    def export(self, plan: Plan, transport: Transport, out: Path) -> None:
        """Writes the model, read from all ranks by the transport, as a Hugging Face folder."""
        write_folder(plan, transport, self._hf_config, self._folder, out)

    def check_checkpoint(self, checkpoint: Checkpoint, role: Role) -> None:
        """This rank's share of the role's files. Raises ValueError that names a damaged one."""
        files = [record for record in checkpoint.files if record.path.startswith(f"{role}/")]
        checkpoint.verify(files[self._rank :: self._settings.layout.world_size])

    def load_checkpoint(self, checkpoint: Checkpoint, role: Role) -> None:
        """Weights, optimizer, counts and random states, in place. A reference stays: it is the model that the run
        started from, as its folder has it."""
        same_layout = checkpoint.state["config"][role]["layout"] == self._settings.layout.model_dump()
        counters = sharded_checkpoint.load(self.chunks, self.optimizer, checkpoint.path / role, same_layout)
        self.num_updates = counters["num_updates"]

    def save_checkpoint(self, checkpoint: Path, role: Role) -> None:
        """Copies everything to host memory; the files, in checkpoint/role, are written while training goes on."""
        counters = {"num_updates": self.num_updates}
        self._saving = sharded_checkpoint.save(self.chunks, self.optimizer, counters, checkpoint / role)

    def checkpoint_written(self) -> bool:
        return self._saving.written

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        """This rank's files, once they are on the disk. Frees the copies."""
        saving, self._saving = self._saving, None
        return saving.finish(checkpoint)

    def close(self) -> None:
        parallel.destroy()

    def _chosen(self, key: str, patterns: Sequence[str]) -> list[str]:
        """This rank's parameters that the patterns (of a key of its section) choose among the model's tensors."""
        key = f"{self._settings.section}.{key}"
        selected = select_tensors(key, patterns, huggingface_holder(self._hf_config).shapes)
        return whole_parameters(key, selected, self.holder)

    def _load_weights(self) -> None:
        """From the folder. A score head that the folder's model does not have starts at zero."""
        source = huggingface_holder(read_config(self._folder))
        missing = {WEIGHT, BIAS}.difference(source.shapes)
        plan = make_plan([source], [self.holder.zeroed(missing)])
        with SafetensorsFolder(self._folder) as transport:
            transport.check(source)
            execute(plan.for_destination(self.holder.name), self.parameters(), transport, cast=True)

    def _training_batches(
        self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]
    ) -> list[TokenBatch]:
        """What the update trains on: the samples, what passes gave for them, and their advantages."""
        batches = self._collate(samples, microbatches, self._kept)
        # Only the last stage reads them, and a critic's values are on no other.
        return with_advantages(self._config.algorithm.advantage, batches) if parallel.is_last_stage(None) else batches

    def _forward(
        self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]
    ) -> dict[str, torch.Tensor]:
        """Forward-only pass: sample id -> first column of the head, float32 [R]; empty before the last stage."""
        scored = step.score(self.chunks, self._collate(samples, microbatches, {}))
        results = {}
        for microbatch, columns in zip(microbatches, scored, strict=False):
            members = [samples[i].sample for i in microbatch]
            parts = columns[:, 0].split([len(sample.response_ids) for sample in members])
            results |= {sample.id: part for sample, part in zip(members, parts, strict=True)}
        return results

    def _keep(self, name: str, scores: Mapping[str, torch.Tensor]) -> None:
        """For the update of the same samples, on the last stage, which alone has scores and reads them."""
        if parallel.is_last_stage(None):
            self._kept.setdefault(name, {}).update(scores)

    def _collate(
        self,
        samples: Sequence[TrainingSample],
        microbatches: Sequence[Microbatch],
        scores: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> list[TokenBatch]:
        return [
            collate([samples[i] for i in members], self.packing, **scores).to(device.device())
            for members in microbatches
        ]
