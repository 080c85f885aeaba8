"""One rank of the implicit reward model: a trained language model whose reference is its initial weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megarl.algorithms.rewards import token_reward
from megarl.config.schema import Config
from megarl.core.token_batch import TokenBatch
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.configured_losses import configured_implicit_reward_loss
from megarl.megatron.losses import Loss
from megarl.megatron.workers.trainer import TrainerWorker


class ImplicitRewardWorker(TrainerWorker):
    role = "implicit_reward"
    metrics = "implicit_reward"
    truncates = False

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        self._weight_snapshots.keep("reference")

    @property
    def temperature(self) -> float:
        return 1.0

    @property
    def loss(self) -> Loss:
        return configured_implicit_reward_loss(self._config.implicit_reward)

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run two forward-only passes and return sample id -> reward for each response token, float32 [R] on the host.

        Each last-stage rank keeps the reference log-probs for the update on the same samples. One rank per
        data-parallel replica returns the rewards.
        """
        with self._weight_snapshots.swapped_in("reference"):
            reference = self._first_column(batch)
        self._keep("reference", reference)
        log_probs = self._first_column(batch)
        if not parallel.returns_results():
            return {}
        config = self._config.implicit_reward
        return {
            name: config.coefficient * token_reward(log_prob, reference[name], config.beta).cpu()
            for name, log_prob in log_probs.items()
        }

    def _training_batches(self, batch: LocalBatch) -> list[TokenBatch]:
        """Return the update's microbatches, without advantages: the model learns from the samples' rewards."""
        return self._scored(batch, self._kept)
