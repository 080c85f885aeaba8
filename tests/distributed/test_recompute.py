"""Recomputing in the backward pass changes neither loss nor gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.forked import run_ranks
from tests.parity import config_of, random_groups, train
from tests.tiny_model import write_tiny_model

DENSE = dict(
    vocab_size=128,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=3,
    intermediate_size=80,
    max_position_embeddings=64,
)
EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=12, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
ROUTER = dict(n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1)
MODELS = {
    "dense": ("llama", DENSE),
    "experts, one dense layer": ("qwen3_moe", DENSE | EXPERTS | dict(num_experts=4, mlp_only_layers=[1])),
    "latent attention, shared experts": (
        "deepseek_v3",
        DENSE | EXPERTS | LATENT | ROUTER | dict(num_experts_per_tok=4),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    model_type, config = MODELS[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("model"), model_type, **config)


def trained(folder: Path, mode: str) -> tuple:
    config = config_of(folder, f"actor.recompute={mode}")
    [rank] = run_ranks(1, train, config, folder, [random_groups(0)])
    return rank.metrics["policy/loss"].value, [*rank.gradients.values(), *rank.weights.values()]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_changes_nothing(folder, mode):
    loss, tensors = trained(folder, "none")
    again, recomputed = trained(folder, mode)
    assert again == loss
    assert all(map(torch.equal, tensors, recomputed))
