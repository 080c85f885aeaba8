"""FLOPs compared with torch's count for the same model in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.models.flops import training_flops
from megarl.models.huggingface import TRANSFORMERS_TYPES
from megarl.models.shape import ModelShape

SIZES = dict(
    vocab_size=100,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    intermediate_size=96,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=80,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "glm4_moe": EXPERTS | dict(head_dim=24, use_qk_norm=True, attention_bias=True),
    "kimi_k2": EXPERTS | LATENT,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_flops_match_torchs_counts(model_type):
    """Torch counts all pairs of query and key, as eager attention computes them, and no gradient of the embedding. It
    also counts the router, which ours does not: less than one percent here."""
    torch.manual_seed(0)
    sizes = SIZES | MODELS[model_type]
    config = AutoConfig.for_model(TRANSFORMERS_TYPES.get(model_type, model_type), **sizes)
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, **eager)
    num_tokens = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[None]).logits.sum().backward()
    shape = ModelShape.of(sizes | {"model_type": model_type})
    ours = training_flops(shape, num_tokens, num_tokens, num_attended=num_tokens**2)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
