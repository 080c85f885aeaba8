"""A teacher in vLLM returns the most probable tokens of transformers."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.ops.top_tokens import TopTokens
from megarl.rollout.vllm.environment import environment
from tests.e2e.engine_processes import engine_context
from tests.parity import TEMPERATURE, config_of, random_groups
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

SAMPLES = [sample for group in random_groups(0) for sample, _ in group]
TOP_K = 5


def in_vllm(folder: Path) -> list[torch.Tensor]:
    """Return the packed tokens for each sample. Runs in a separate process."""
    os.environ.update(environment(ranks=1, threads=1, index=0))
    from megarl.rollout.vllm.teacher import VllmTeacher, teacher_arguments

    config = config_of(
        folder,
        *(f"teachers.models=[{{name: a, path: {folder}, engine: vllm}}]", "teachers.tokens_per_microbatch=80"),
        *("teachers.kv_cache_gib=0.05", f"algorithm.distillation={{divergence: reverse_kl, top_k: {TOP_K}}}"),
        "algorithm.distillation.placement=loss",
    )
    return VllmTeacher(teacher_arguments(config, folder), config.rollout.temperature).scores(SAMPLES)


def test_most_probable_tokens_are_those_of_transformers(tmp_path):
    """The samples have up to rollout.context_length tokens, and their temperature is not 1."""
    folder = write_tiny_llama(tmp_path, hidden_size=128, num_heads=4, num_kv_heads=2, tied=False, seed=3)
    with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
        found = pool.submit(in_vllm, folder).result(timeout=RUN_S)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for sample, packed in zip(SAMPLES, found, strict=True):
        actual, first = TopTokens.unpacked(packed), len(sample.prompt.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor(sample.token_ids[None]).long()).logits[0, first - 1 : -1] / TEMPERATURE
        expected = logits.log_softmax(-1).topk(TOP_K)
        assert torch.equal(actual.ids, expected.indices)
        torch.testing.assert_close(actual.log_probs, expected.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(actual.rest.exp(), 1 - expected.values.exp().sum(-1), rtol=0, atol=1e-4)
