"""FLOPs compared with torch's count for the same model in transformers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.models.flops import training_flops
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
HF = SIZES | {"model_type": "llama"}


def test_flops_match_torchs_counts():
    """Torch counts all pairs of query and key, as eager attention computes them, and no gradient of the embedding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    num_tokens = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[None]).logits.sum().backward()
    ours = training_flops(ModelShape.of(HF), num_tokens, num_tokens, num_attended=num_tokens**2)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
