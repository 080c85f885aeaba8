"""A vLLM model whose weights are loaded from its folder and never change. Before importing this module, set the
variables in `environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM
from vllm.inputs import TokensPrompt

from megarl.core.sample import Sample
from megarl.rollout.vllm.ranks import has_lost_a_rank


class LoadedModel:
    """A vLLM engine with the weights in the model's folder."""

    def __init__(self, arguments: Mapping[str, Any]):
        self._llm = LLM(**arguments)

    @property
    def has_lost_a_rank(self) -> bool:
        return has_lost_a_rank(self._llm)


def token_prompts(samples: Sequence[Sample]) -> list[TokensPrompt]:
    """Return one engine prompt per sample: the tokens of its prompt and its response."""
    has_images = any(sample.images for sample in samples)
    assert not has_images, "images reached a text-only model; config rules should reject them"
    return [TokensPrompt(prompt_token_ids=sample.token_ids.tolist()) for sample in samples]
