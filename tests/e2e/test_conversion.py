"""vLLM and transformers on a model that has been to Megatron's format, through two layouts, and back."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.batch import Prompt, Sample
from megarl.config.load import load
from megarl.megatron.conversion import huggingface_to_megatron, layout_of_files, megatron_to_huggingface, reshape
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.environment import environment
from tests.e2e.test_refit import SIZES as REFIT_SIZES
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
TOLERANCE = 1e-4
SIZES = REFIT_SIZES | dict(vocab_size=131, num_key_value_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(tie_word_embeddings=True),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True),
}


def sampled(folder: Path) -> list[Sample]:
    """By an engine that loads the folder itself, in a process of its own."""
    overrides = ["rollout.temperature=1", "rollout.max_new_tokens=12", "rollout.context_length=64"]
    engine = [*overrides, "rollout.kv_cache_gib=0.05", "rollout.vllm_extra={block_size: 32, load_format: auto}"]
    config = load(BASE, [f"model.path={folder}", "model.dtype=float32", "data.source=arithmetic", *engine])
    os.environ.update(environment(config.rollout.tp, threads=1, index=0))
    from megarl.rollout.vllm_engine import VllmEngine

    started = VllmEngine(config.rollout, folder, "float32", seed=0)
    started.hold(0)
    source = random.Random(0)
    prompts = [Prompt(f"{i}", "", tuple(source.randrange(6, 131) for _ in range(n))) for i, n in enumerate((1, 9, 33))]
    requests = [SamplingRequest(prompt.id, prompt, seed=i) for i, prompt in enumerate(prompts)]
    return asyncio.run(started.generate(requests))


@pytest.mark.parametrize("model_type", MODELS)
def test_vllm_and_transformers_load_it_and_agree(tmp_path, model_type):
    original = write_tiny_model(tmp_path / "original", model_type, **SIZES | MODELS[model_type])
    huggingface_to_megatron(original, tmp_path / "first", layout_of_files(tp=2, pp=2))
    reshape(tmp_path / "first", tmp_path / "second", layout_of_files(pp=2, ep=1 if model_type == "llama" else 2))
    back = tmp_path / "back"
    megatron_to_huggingface(tmp_path / "second", back, shard_bytes=50_000)

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        samples = process.submit(sampled, back).result(timeout=300)
    assert len({sample.response_ids for sample in samples}) == 3
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    for sample in samples:
        ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, len(sample.prompt.token_ids) - 1 : -1]
        expected = log_probs.gather(1, ids[0, len(sample.prompt.token_ids) :, None])[:, 0]
        assert (torch.tensor(sample.response_logprobs) - expected).abs().max() <= TOLERANCE
    text = "7+5="
    assert AutoTokenizer.from_pretrained(back).encode(text) == AutoTokenizer.from_pretrained(original).encode(text)
