"""Every model family in Megatron against transformers: logits, and the gradients and weights of a GRPO update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.worker import TrainerWorker
from tests.distributed.test_grpo_parity import (
    assert_equal,
    canonical,
    capture_gradients,
    config_of,
    random_groups,
    shares,
)
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.tiny_model import write_tiny_model

LOGITS_TOLERANCE = 1e-5
TEMPERATURE = 0.8

DENSE = dict(
    vocab_size=128,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    num_hidden_layers=2,
    intermediate_size=80,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3, tied": ("llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)),
    "Llama, linear rope": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "Llama, all biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "Llama, attention biases": ("llama", dict(attention_bias=True)),
    "Llama, MLP biases": ("llama", dict(mlp_bias=True)),
    "Mistral": ("mistral", dict(head_dim=16, sliding_window=64)),
    "Qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("qwen3", dict(head_dim=16, rms_norm_eps=1e-5)),
    "Qwen3, tied": ("qwen3", dict(tie_word_embeddings=True)),
}


def update(store, rank: int, config, folder: Path, groups: list) -> tuple:
    """On one rank, an update: its holder, gradients, weights; and by sample id the logits before it."""
    worker = TrainerWorker(config, folder, rank, store, threads=1)
    [share] = shares(config, worker.packing, groups)
    samples = [item.training_sample(item.sample) for item in share.samples]
    logits = capture_logits(worker)
    worker.score("old", samples, share.microbatches)
    order = [samples[i].sample for members in share.microbatches for i in members]
    parts = torch.cat(logits).split([len(sample.response_ids) for sample in order])
    gradients = capture_gradients(worker)
    worker.update(samples, share.microbatches)
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    return worker.holder, gradients, weights, {s.id: part for s, part in zip(order, parts, strict=True)}


def capture_logits(worker: TrainerWorker) -> list[torch.Tensor]:
    """Fills a list, on every call of the model without gradients, with the logits [N, vocabulary] of the rows."""
    captured: list[torch.Tensor] = []

    def compute(head, inputs, keywords):
        if not torch.is_grad_enabled():
            hidden, weight = inputs[0], keywords.get("weight")
            weight = head.weight if weight is None else weight
            captured.append(hidden[:, 0][head.request.rows] @ weight[: head.vocab_size].T)

    worker.chunks[0].module.output_layer.register_forward_pre_hook(compute, with_kwargs=True)
    return captured


@torch.no_grad()
def transformers_logits(model: torch.nn.Module, sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
    return model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name, tmp_path):
    model_type, changes = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", model_type, **DENSE | changes)
    config = config_of(folder)
    groups = random_groups(0)
    [rank] = run_ranks(1, update, config, folder, groups)

    reference = GrpoReference(folder, lr=1e-3, eps=1e-5, temperature=TEMPERATURE)
    for sample in [sample for group in groups for sample, _ in group]:
        theirs = transformers_logits(reference.model, sample)
        assert (rank[3][sample.id] - theirs).abs().max() <= LOGITS_TOLERANCE, sample.id
    _, gradients, _ = reference.update(groups, 0.0, clip_norm=1.0)
    assert_equal(canonical(folder, [rank], 1), gradients, "gradient")
    assert_equal(canonical(folder, [rank], 2), dict(reference.model.named_parameters()), "weight")
