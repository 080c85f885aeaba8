"""Relative costs compared with torch's FLOP counts for models of transformers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.models.token_cost import TokenCost

COMMON = dict(
    vocab_size=128,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_hidden_layers=3,
    intermediate_size=80,
)
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", dict(head_dim=16)),
}


def operations(model: torch.nn.Module, num_tokens: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[None])
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_costs_match_torchs_flop_counts(name):
    model_type, changes = MODELS[name]
    config = AutoConfig.for_model(model_type, **COMMON | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    cost = TokenCost.of_model(config.to_dict())
    # The backbone takes linear · T + pair · T², the head scored · T operations; eager attention computes all pairs.
    few, many = operations(model.model, 8), operations(model.model, 16)
    pair = (many - 2 * few) / (16**2 - 2 * 8**2)
    linear = (few - 8**2 * pair) / 8
    scored = (operations(model, 8) - few) / 8
    assert cost.attended == pytest.approx(pair / linear)
    assert cost.scored == pytest.approx(scored / linear)


def test_token_cost_counts_only_active_experts():
    config = COMMON | dict(model_type="qwen3_moe", head_dim=8, moe_intermediate_size=20, num_experts_per_tok=4)
    few, many = (TokenCost.of_model(config | dict(num_experts=count)) for count in (8, 64))
    dense = TokenCost.of_model(COMMON | dict(model_type="qwen3", head_dim=8))  # 4 · 20 rows of 80
    assert few == many == dense
