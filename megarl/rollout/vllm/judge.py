"""Run an LLM judge in vLLM. The process must set the variables in `environment` before it imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from megarl.config.schema import Config
from megarl.core.types import Sample
from megarl.rollout.vllm.engine_arguments import engine_arguments


def judge_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a judge. Raise UserError under the same conditions as
    `engine_arguments`."""
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
    )


class VllmJudge:
    """A language model with the weights in its folder, which answers questions with greedy sampling."""

    def __init__(self, arguments: Mapping[str, Any], max_new_tokens: int):
        """
        arguments   result of `judge_arguments`
        """
        self._llm = LLM(**arguments)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)

    def scores(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the answer to each question as token ids, int64 [A]. The caller parses the rating in the text."""
        questions = [{"prompt_token_ids": sample.token_ids.tolist()} for sample in samples]
        outputs = self._llm.generate(questions, self._sampling, use_tqdm=False)
        return [torch.tensor(output.outputs[0].token_ids, dtype=torch.int64) for output in outputs]
