"""One rank of a reward model that is trained on preferences: a classifier of whole samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch.distributed import Store

from megarl.config.classifier import as_classifier
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.megatron.losses import Loss, reward_model_loss
from megarl.megatron.workers.trainer import TrainerWorker


class PreferenceWorker(TrainerWorker):
    role = "actor"
    metrics = "reward_model"
    reads = "tokens"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        """model_folder: a classifier with one label, or a language model, whose score head then starts at 0."""
        super().__init__(config, as_classifier(read_config(model_folder)), model_folder, rank, store, threads)

    @property
    def objective(self) -> Loss:
        return partial(reward_model_loss, self._config.algorithm.objective)
