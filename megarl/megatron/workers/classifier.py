"""One rank of a trained reward model: a classifier trained on sample pairs (preferences) or on token labels."""

from __future__ import annotations

from typing import Any

from megarl.megatron.configured_losses import configured_reward_model_loss
from megarl.megatron.losses import Loss
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.classifier import as_classifier


class ClassifierWorker(TrainerWorker):
    role = "actor"
    metrics = "reward_model"
    reads = "tokens"

    def _model_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the config for a classifier with one label. If the folder contains a language model, the score head is
        zero-initialized."""
        kind = self._config.algorithm.objective.spec.classifier
        assert kind is not None, "the objective does not train a classifier"
        return as_classifier(hf_config, kind)

    @property
    def loss(self) -> Loss:
        return configured_reward_model_loss(self._config.algorithm.objective)
