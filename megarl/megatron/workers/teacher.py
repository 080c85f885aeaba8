"""One rank of a teacher: a language model that computes log-probs of the actor's tokens, its own most probable tokens
or, for exact divergences, final hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megarl.config.schema import Config
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.model.head import heads_of
from megarl.megatron.workers.untrained import UntrainedWorker


class TeacherWorker(UntrainedWorker):
    role = "teachers"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        distillation = config.algorithm.distillation
        for head in heads_of(self.chunks):
            head.returns_hidden, head.top_k = distillation.is_exact, distillation.top_k

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> log-prob of each response token, float32 [R] on the host. The
        logits are divided by the actor's sampling temperature and, with rollout.top_k, normalized over the engine's
        candidate tokens, as for the actor's own log-probs. For an exact divergence, return the final hidden state that
        predicts each response token, [R, h] in the model's dtype; with distillation.top_k, packed TopTokens, float32
        [R, 2k + 1]. One rank per replica returns the results."""
        is_sampled = self._config.algorithm.distillation.is_sampled
        with self._present():
            scored = self._first_column(batch) if is_sampled else self._forward(batch, to_host=True)
        return {name: values.cpu() for name, values in scored.items()} if parallel.returns_results() else {}
