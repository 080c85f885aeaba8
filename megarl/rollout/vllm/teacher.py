"""Run a teacher in vLLM. Before importing this module, set the variables in `environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs

from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.models.folder import read_config
from megarl.models.shape import ModelShape
from megarl.ops.top_tokens import TopTokens
from megarl.rollout.vllm.engine_arguments import engine_arguments
from megarl.rollout.vllm.loaded_model import LoadedModel, token_prompts
from megarl.rollout.vllm.worker_extension import RefitExtension


def teacher_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a teacher with the layout in config.teachers. Raise a UserError in the
    same cases as `engine_arguments`."""
    settings = config.teachers
    # The engine samples a token after each sequence, because vLLM has no request without sampling.
    context_length = config.context_of(settings)[1] + 1
    return engine_arguments(
        "teachers",
        folder,
        config.model.dtype,
        settings.layout.tp,
        context_length,
        settings.kv_cache_gib,
        settings.vllm_overrides,
        max_logprobs=num_top_tokens(config, folder),
        max_num_batched_tokens=max(settings.tokens_per_microbatch, context_length),
        hf_overrides={"head_dtype": config.model.head_dtype},
        seed=config.run.seed,
    )


def num_top_tokens(config: Config, folder: Path) -> int:
    """Return the number of most probable tokens that the divergence needs at each position."""
    return min(config.algorithm.distillation.top_k or 0, ModelShape.of(read_config(folder)).vocab)


class VllmTeacher(LoadedModel):
    """A language model that computes log-probs of the actor's tokens, or its own most probable tokens."""

    def __init__(self, arguments: Mapping[str, Any], temperature: float):
        """
        Args:
            arguments: the result of `teacher_arguments`.
            temperature: divisor of the logits. vLLM does not apply a request's temperature to prompt tokens.
        """
        super().__init__(arguments)
        self._top_k: int = arguments["max_logprobs"]
        self._llm.collective_rpc(RefitExtension.divide_logits.__name__, args=(temperature,))
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=self._top_k, flat_logprobs=True, detokenize=False
        )

    def scores(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return the log-prob of each response token, float32 [R], or packed TopTokens, float32 [R, 2k + 1]."""
        outputs = self._llm.generate(token_prompts(samples), self._sampling, use_tqdm=False)
        return [self._scores(output.prompt_logprobs, sample) for output, sample in zip(outputs, samples, strict=True)]

    def _scores(self, logprobs: Any, sample: Sample) -> torch.Tensor:
        assert isinstance(logprobs, FlatLogprobs), "the output has no flat log-probs"
        # The first token has no entry. Each other entry lists the token itself, then the most probable tokens.
        first, width = len(sample.prompt.token_ids) - 1, self._top_k + 1
        values = torch.from_numpy(np.array(logprobs.logprobs, np.float32)).view(-1, width)[first:]
        assert len(values) == len(sample.response_ids), (
            f"sample {sample.id}: {len(values)} log-probs for {len(sample.response_ids)} response tokens"
        )
        if not self._top_k:
            return values[:, 0]
        ids = torch.from_numpy(np.array(logprobs.token_ids, np.int64)).view(-1, width)[first:]
        return TopTokens.of(ids[:, 1:], values[:, 1:]).packed
