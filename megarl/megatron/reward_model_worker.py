"""One rank of a reward model: a classifier that scores samples by the token ids that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.distributed import Store

from megarl.batch import Sample, TrainingSample
from megarl.config.classifier import score_head_of
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.data.packing import Microbatch
from megarl.data.tokenizer import load_tokenizer
from megarl.megatron import parallel
from megarl.megatron.model_worker import ModelWorker
from megarl.rewards.process import aggregated, step_ends


class RewardModelWorker(ModelWorker):
    role = "reward_model"
    reads = "tokens"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, read_config(model_folder), model_folder, rank, store, threads)
        self._kind = score_head_of(self._hf_config).kind
        self._tokenizer = None if config.reward_model.step_end is None else load_tokenizer(model_folder)

    def scores(self, samples: Sequence[TrainingSample], microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """Sample id -> its reward; not finite where the model's scores are not. One rank of each data-parallel replica
        returns them."""
        by_token = self._forward(samples, microbatches)
        if not parallel.returns_results():
            return {}
        return {item.sample.id: self._reward(item.sample, by_token[item.sample.id][:, 0].tolist()) for item in samples}

    def _reward(self, sample: Sample, scores: Sequence[float]) -> float:
        settings = self._config.reward_model
        if self._kind == "sequence":
            return scores[-1]
        if self._tokenizer is not None:
            pieces = [self._tokenizer.decode([token]) for token in sample.response_ids]
            scores = [scores[i] for i in step_ends(pieces, settings.step_end)]
        return aggregated(settings.aggregation, scores)
