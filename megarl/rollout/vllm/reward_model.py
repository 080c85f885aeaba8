"""Run a classifier or an LLM judge in vLLM. Before importing this module, set the variables in `environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import PoolerConfig

from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.models.classifier import score_head_of
from megarl.models.folder import read_config
from megarl.rollout.vllm.engine_arguments import engine_arguments
from megarl.rollout.vllm.loaded_model import LoadedModel, token_prompts


def judge_arguments(config: Config, folder: Path, **specific: Any) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a judge, including those in `specific`. Raise a UserError in the same
    cases as `engine_arguments`."""
    settings = config.reward_model
    return engine_arguments(
        "reward_model",
        folder,
        config.model.dtype,
        settings.layout.tp,
        config.context_of(settings)[1],
        settings.kv_cache_gib,
        settings.vllm_overrides,
        max_num_batched_tokens=settings.tokens_per_microbatch,
        seed=config.run.seed,
        **specific,
    )


def classifier_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a classifier. Raise a UserError in the same cases as
    `engine_arguments`."""
    head = score_head_of(read_config(folder))
    assert head is not None, "preflight rejects models without a score head"
    # Request the head's raw output. By default, vLLM applies a sigmoid or softmax to it.
    pooler = PoolerConfig(task="classify" if head.kind == "sequence" else "token_classify", use_activation=False)
    return judge_arguments(config, folder, runner="pooling", pooler_config=pooler)


class VllmClassifier(LoadedModel):
    """A classifier with the weights in its folder. It scores samples by their token ids."""

    def __init__(self, arguments: Mapping[str, Any]):
        """`arguments` is the result of `classifier_arguments`."""
        super().__init__(arguments)
        self._task = arguments["pooler_config"].task

    def scores(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the scores for each sample, float32: [R] for a token classifier, or [1] for a sequence classifier."""
        outputs = self._llm.encode(token_prompts(samples), pooling_task=self._task, use_tqdm=False)
        # The head has one label, so its output is [1] or [tokens, 1].
        scores = [output.outputs.data.float().flatten().cpu().clone() for output in outputs]
        return [values[-len(sample.response_ids) :] for sample, values in zip(samples, scores, strict=True)]


class VllmJudge(LoadedModel):
    """A language model with the weights in its folder. It answers questions with greedy decoding."""

    def __init__(self, arguments: Mapping[str, Any], max_new_tokens: int):
        """`arguments` is the result of `judge_arguments`."""
        super().__init__(arguments)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)

    def scores(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the answer to each question as token ids, int64 [A]. The caller parses the rating in the text."""
        outputs = self._llm.generate(token_prompts(samples), self._sampling, use_tqdm=False)
        return [torch.tensor(output.outputs[0].token_ids, dtype=torch.int64) for output in outputs]
