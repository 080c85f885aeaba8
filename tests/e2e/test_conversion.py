"""After conversion to Megatron's format, through two layouts and back, vLLM and transformers agree on a model's
log-probs."""

from __future__ import annotations

import asyncio
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.megatron.checkpoint.conversion import (
    huggingface_to_megatron,
    layout_of_files,
    megatron_to_huggingface,
    reshape,
)
from megarl.models.folder import read_config
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.vllm.environment import environment
from tests.e2e.engine_processes import engine_context
from tests.e2e.tiny_families import SIZES as COMMON_SIZES
from tests.paths import BASE
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
SIZES = COMMON_SIZES | dict(vocab_size=131, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)


def sampled(folder: Path) -> list[Sample]:
    """Sample from an engine in a separate process that loads the folder itself."""
    with ProcessPoolExecutor(1, mp_context=engine_context()) as process:
        return process.submit(_sample, folder).result(timeout=RUN_S)


def _sample(folder: Path) -> list[Sample]:
    overrides = ["rollout.temperature=1", "rollout.max_new_tokens=12", "rollout.context_length=64"]
    engine = [*overrides, "rollout.kv_cache_gib=0.05", "rollout.vllm_overrides={block_size: 32, load_format: auto}"]
    config = load(BASE, [f"model.path={folder}", "model.dtype=float32", "data.source=arithmetic", *engine])
    os.environ.update(environment(config.rollout.tp, threads=1, index=0))
    from megarl.rollout.vllm.engine import VllmEngine
    from megarl.rollout.vllm.engine_arguments import rollout_arguments

    started = VllmEngine(config.rollout, rollout_arguments(config.rollout, folder, "float32", seed=0))
    started.hold(0)
    source, vocab = random.Random(0), read_config(folder)["vocab_size"]
    lengths = (1, 9, 33)
    prompts = [Prompt(f"{i}", "", tuple(source.randrange(6, vocab) for _ in range(n))) for i, n in enumerate(lengths)]
    requests = [SamplingRequest(prompt.id, prompt, seed=i) for i, prompt in enumerate(prompts)]
    return asyncio.run(started.generate(requests))


def assert_log_probs_are_of(folder: Path, samples: list[Sample]) -> None:
    """Check that transformers computes the same log-probs for the samples with the folder's model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(samples) == 3
    for sample in samples:
        ids = torch.tensor(sample.token_ids[None]).long()
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, len(sample.prompt.token_ids) - 1 : -1]
        expected = log_probs.gather(1, ids[0, len(sample.prompt.token_ids) :, None])[:, 0]
        assert (torch.tensor(sample.response_logprobs) - expected).abs().max() <= TOLERANCE


def test_vllm_and_transformers_agree_after_conversion(tmp_path):
    original = write_tiny_model(tmp_path / "original", "qwen3_moe", **SIZES | EXPERTS)
    huggingface_to_megatron(original, tmp_path / "first", layout_of_files(tp=2, pp=2))
    reshape(tmp_path / "first", tmp_path / "second", layout_of_files(pp=2, ep=2))
    back = tmp_path / "back"
    megatron_to_huggingface(tmp_path / "second", back, shard_bytes=50_000)
    assert_log_probs_are_of(original, sampled(back))
    text = "7+5="
    assert AutoTokenizer.from_pretrained(back).encode(text) == AutoTokenizer.from_pretrained(original).encode(text)
