"""One rank of a reward model: a classifier that scores whole samples or their tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megarl.config.schema import Config
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.workers.untrained import UntrainedWorker
from megarl.models.classifier import score_head_of


class RewardModelWorker(UntrainedWorker):
    role = "reward_model"
    reads = "tokens"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        head = score_head_of(self._hf_config)
        assert head is not None, "the reward model is not a classifier"
        self._kind = head.kind

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> score for each response token, float32 [R] on the host. A
        sequence classifier returns the last token's score, [1]. One rank per replica returns the scores."""
        with self._present():
            scores = self._first_column(batch)
        if not parallel.returns_results():
            return {}
        first = -1 if self._kind == "sequence" else 0
        return {name: score[first:].cpu() for name, score in scores.items()}
