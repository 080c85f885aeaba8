"""One rank of a teacher: a language model that computes log-probs of the actor's tokens or, for exact divergences,
final hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megarl.config.schema import Config
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.model.head import LogProbHead
from megarl.megatron.workers.untrained import UntrainedWorker


class TeacherWorker(UntrainedWorker):
    role = "teachers"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            if isinstance(module, LogProbHead):
                module.returns_hidden = config.distills_exactly

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> log-prob of each response token, float32 [R] on the host. The
        logits are divided by the actor's sampling temperature and, with rollout.top_k, normalized over the engine's
        candidate tokens, as for the actor's own log-probs. For an exact divergence, return the final hidden state that
        predicts each response token, [R, h] in the model's dtype. One rank per replica returns the results."""
        is_exact = self._config.distills_exactly
        with self._present():
            scored = self._forward(batch, to_host=True) if is_exact else self._first_column(batch)
        return {name: values.cpu() for name, values in scored.items()} if parallel.returns_results() else {}
