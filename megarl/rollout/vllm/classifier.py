"""Run a classifier in vLLM. The process must set the variables in `environment` before it imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.config import PoolerConfig

from megarl.config.schema import Config
from megarl.core.types import Sample
from megarl.models.classifier import score_head_of
from megarl.models.folder import read_config
from megarl.rollout.vllm.engine_arguments import engine_arguments


def classifier_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a classifier. Raise UserError under the same conditions as
    `engine_arguments`."""
    settings, head = config.reward_model, score_head_of(read_config(folder))
    assert head is not None, "preflight rejects models without a score head"
    task = {"sequence": "classify", "token": "token_classify"}[head.kind]
    return engine_arguments(
        "reward_model",
        folder,
        config.model.dtype,
        settings.layout.tp,
        config.context_of(settings)[1],
        settings.kv_cache_gib,
        settings.vllm_overrides,
        runner="pooling",
        # Return the raw output of the head. By default, vLLM applies a sigmoid or softmax.
        pooler_config=PoolerConfig(task=task, use_activation=False),
        max_num_batched_tokens=settings.tokens_per_microbatch,
        seed=config.run.seed,
    )


class VllmClassifier:
    """A classifier with the weights in its folder, which scores samples by their token ids."""

    def __init__(self, arguments: Mapping[str, Any]):
        """
        arguments   result of `classifier_arguments`
        """
        self._task = arguments["pooler_config"].task
        self._llm = LLM(**arguments)

    def scores(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the scores for each sample, float32: [R] for a token classifier, or [1] for a sequence classifier."""
        outputs = self._llm.encode(
            [{"prompt_token_ids": sample.token_ids.tolist()} for sample in samples],
            pooling_task=self._task,
            use_tqdm=False,
        )
        return [
            _scores(output.outputs.data)[-len(sample.response_ids) :]
            for sample, output in zip(samples, outputs, strict=True)
        ]


def _scores(pooled: torch.Tensor) -> torch.Tensor:
    """Convert the output of a head with one label, [1] or [tokens, 1], to a new float32 CPU tensor [tokens]."""
    return pooled.float().flatten().cpu().clone()
