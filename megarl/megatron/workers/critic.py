"""One rank of the critic: a separate backbone with a value head."""

from __future__ import annotations

from typing import Any

import torch

from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.configured_losses import configured_value_loss
from megarl.megatron.losses import Loss
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.classifier import as_classifier


class CriticWorker(TrainerWorker):
    role = "critic"
    metrics = "value"

    def _model_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the config for a classifier with one label. If the folder contains a language model, the value head is
        zero-initialized."""
        return as_classifier(hf_config)

    @property
    def loss(self) -> Loss:
        return configured_value_loss(self._config.algorithm.value)

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> value before each response token, float32 [R] on the host.

        Each last-stage rank keeps the values for the update on the same samples. One rank per data-parallel replica
        returns the values.
        """
        values = self._first_column(batch)
        self._keep("values", values)
        return {name: value.cpu() for name, value in values.items()} if parallel.returns_results() else {}
