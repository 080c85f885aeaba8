"""One rank of the critic: a separate backbone with a value head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import Store

from megarl.config.schema import Config
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.configured_losses import configured_value_loss
from megarl.megatron.losses import Loss
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.classifier import as_classifier
from megarl.models.folder import read_config


class CriticWorker(TrainerWorker):
    role = "critic"
    metrics = "value"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        """`model_folder` contains a classifier with one label, or a language model, for which the value head starts at
        0."""
        hf_config = as_classifier(read_config(model_folder))
        super().__init__(config, hf_config, model_folder, rank, store, threads)

    @property
    def loss(self) -> Loss:
        return configured_value_loss(self._config.algorithm.value)

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> value of the state before each response token, float32 [R] on
        the host.

        Each last-stage rank keeps the values for the update on the same samples. One rank per data-parallel replica
        returns them.
        """
        values = {name: columns[:, 0] for name, columns in self._forward(batch).items()}
        self._keep("values", values)
        return {name: value.cpu() for name, value in values.items()} if parallel.returns_results() else {}
