"""One rank of the actor: the policy that is trained, and its reference, a second set of the same model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import Store

from megarl.batch import TokenBatch, TrainingSample
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.data.packing import Microbatch
from megarl.megatron.model import named_weights
from megarl.megatron.objective import policy_objective
from megarl.megatron.sums import Sums
from megarl.megatron.weight_sets import WeightSets
from megarl.megatron.worker import TrainerWorker

Scorer = Literal["old", "reference"]
"""Whose log-probs a forward-only pass computes: the policy's at the start of the step, or the reference's."""


class ActorWorker(TrainerWorker):
    role = "actor"
    metrics = "policy"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, read_config(model_folder), model_folder, rank, store, threads)
        self._weight_sets = WeightSets(named_weights(self.chunks))
        if config.algorithm.kl.coefficient:
            self._weight_sets.keep("reference")

    def objective(self, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        return policy_objective(self._config.algorithm, batch, scored)

    def score(self, scorer: Scorer, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]) -> None:
        """Forward-only pass; the log-probs stay here, for the update of the same samples."""
        weights = self._weight_sets.swapped_in("reference") if scorer == "reference" else nullcontext()
        with weights:
            log_probs = self._forward(samples, microbatches)
        self._keep(scorer, log_probs)
