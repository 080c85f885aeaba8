"""One rank of a trained reward model: a classifier trained on sample pairs (preferences) or on token labels."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import Store

from megarl.config.schema import Config
from megarl.megatron.configured_losses import configured_reward_model_loss
from megarl.megatron.losses import Loss
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.classifier import as_classifier
from megarl.models.folder import read_config


class ClassifierWorker(TrainerWorker):
    role = "actor"
    metrics = "reward_model"
    reads = "tokens"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        """`model_folder` contains a classifier with one label, or a language model, for which the score head starts at
        0."""
        hf_config = as_classifier(read_config(model_folder), config.algorithm.objective.spec.classifier)
        super().__init__(config, hf_config, model_folder, rank, store, threads)

    @property
    def loss(self) -> Loss:
        return configured_reward_model_loss(self._config.algorithm.objective)
