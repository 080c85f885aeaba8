"""One rank of a teacher: a language model that computes the log-probs of the tokens that the actor sampled."""

from __future__ import annotations

import torch

from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.workers.untrained import UntrainedWorker


class TeacherWorker(UntrainedWorker):
    role = "teachers"

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> log-prob of each response token, float32 [R] on the host. The
        logits are divided by the actor's sampling temperature and, with rollout.top_k, normalized over the engine's
        candidate tokens, as for the actor's own log-probs. One rank per replica returns the log-probs."""
        with self._present():
            log_probs = self._first_column(batch)
        return {name: values.cpu() for name, values in log_probs.items()} if parallel.returns_results() else {}
