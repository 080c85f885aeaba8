"""One trainer rank: its shard of the actor, its optimizer, and the passes that a step asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import Store

from megarl import device
from megarl.batch import TokenBatch, TrainingSample
from megarl.config.learning_rate import learning_rate
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.data.model_folder import read_config
from megarl.data.packing import Microbatch
from megarl.megatron import parallel, step
from megarl.megatron.layer_spec import uses_transformer_engine
from megarl.megatron.model import VOCABULARY_MULTIPLE, build_model, named_parameters
from megarl.megatron.optimizer import build_optimizer, set_rates
from megarl.megatron.packing import packing_of
from megarl.megatron.weight_sets import WeightSets
from megarl.metrics import Metric
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.piece import Holder
from megarl.resharding.plan import Plan, make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.shared_memory import PublishedParameter, publish
from megarl.resharding.transports.transport import Transport

Scorer = Literal["old", "reference"]
"""Whose log-probs a forward-only pass computes: the policy's at the start of the step, or the reference's."""


class TrainerWorker:
    """Samples come and go as `Sample`s; tensors made from them stay here."""

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        self._config, self._folder, self._rank = config, model_folder, rank
        self._hf_config = read_config(model_folder)
        self._kept: dict[Scorer, dict[str, torch.Tensor]] = {"old": {}, "reference": {}}
        self.packing = packing_of(config.actor.layout, config.actor.tokens_per_microbatch, self._hf_config)
        dtype = getattr(torch, config.model.dtype)
        device.claim(threads)
        parallel.initialize(config.actor.layout, store, rank, config.run.seed, timeout_s=config.cluster.step_timeout_s)
        self.chunks = build_model(
            config.actor, self._hf_config, dtype, config.rollout.temperature, config.rollout.context_length
        )
        self._load_weights()
        self.optimizer = build_optimizer(config.actor.optimizer, self.chunks, dtype)
        self.num_updates = 0
        """Optimizer steps done; the learning rate follows from it."""
        self._weight_sets = WeightSets(named_parameters(self.chunks))
        if config.algorithm.kl.coefficient:
            self._weight_sets.keep("reference")

    @property
    def holder(self) -> Holder:
        return trainer_holder(self._config, self._hf_config, self._rank)

    @property
    def data_parallel_rank(self) -> int:
        return parallel.data_parallel_rank()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in named_parameters(self.chunks).items()}

    def publish(self) -> dict[str, PublishedParameter]:
        """Moves the live parameters into shared memory, where an engine on this machine reads them from now on."""
        return publish(self.parameters())

    def score(self, scorer: Scorer, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]) -> None:
        """Forward-only pass; the log-probs stay here, for the update of the same samples."""
        batches = self._collate(samples, microbatches, with_scores=False)
        weights = self._weight_sets.swapped_in("reference") if scorer == "reference" else nullcontext()
        with weights:
            scored = step.log_probs(self.chunks, batches)
        for microbatch, log_prob in zip(microbatches, scored, strict=False):
            members = [samples[i] for i in microbatch]
            parts = log_prob.split([len(member.sample.response_ids) for member in members])
            self._kept[scorer].update((m.sample.id, part) for m, part in zip(members, parts, strict=True))

    def update(self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]) -> dict[str, Metric]:
        """One optimizer step. Returns metrics on the ranks that report for their replica, nothing on the others."""
        batches = self._collate(samples, microbatches, with_scores=True)
        rate = learning_rate(self._config.actor.optimizer, self.num_updates, self._config.num_updates)
        set_rates(self.optimizer, rate, self._config.actor.optimizer.weight_decay)
        metrics = step.update(self.chunks, self.optimizer, self._config.algorithm, batches)
        self.num_updates += 1
        metrics["optimizer/lr"] = Metric(rate)
        return metrics if parallel.reports_metrics() else {}

    def end_step(self) -> None:
        """Its samples do not come back, and whoever reads the parameters now finds them complete."""
        step.gather_parameters(self.chunks)
        for kept in self._kept.values():
            kept.clear()

    def export(self, plan: Plan, transport: Transport, out: Path) -> None:
        """Writes the model, read from all ranks by the transport, as a Hugging Face folder."""
        write_folder(plan, transport, self._hf_config, self._folder, out)

    def close(self) -> None:
        parallel.destroy()

    def _load_weights(self) -> None:
        source = huggingface_holder(self._hf_config)
        plan = make_plan([source], [self.holder])
        with SafetensorsFolder(self._folder) as transport:
            transport.check(source)
            execute(plan.for_destination(self.holder.name), self.parameters(), transport, cast=True)

    def _collate(
        self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch], with_scores: bool
    ) -> list[TokenBatch]:
        scores = {scorer: kept if with_scores and kept else None for scorer, kept in self._kept.items()}
        return [
            collate([samples[i] for i in members], self.packing, **scores).to(device.device())
            for members in microbatches
        ]


def trainer_holder(config: Config, hf_config: dict, rank: int) -> Holder:
    return megatron_holder(
        hf_config,
        config.actor.layout,
        rank,
        transformer_engine=uses_transformer_engine(),
        vocab_multiple=VOCABULARY_MULTIPLE,
    )
