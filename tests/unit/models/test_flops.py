"""FLOPs compared with torch's count for the same model in transformers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from megarl.models.families import TRANSFORMERS_TYPES
from megarl.models.flops import forward_flops, image_flops, training_flops, vision_flops
from megarl.models.folder import read_config
from megarl.models.shape import ModelShape
from megarl.models.vision import add_vision, vision_of
from tests import tiny_vision

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
    "gpt_oss": dict(head_dim=24, num_local_experts=4, num_experts_per_tok=2),
    "kimi_k2": EXPERTS | LATENT,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_flops_match_torchs_counts(model_type):
    """Torch counts all (query, key) pairs, because eager attention computes them all. It also counts the router, which
    `training_flops` omits: less than one percent here."""
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


def test_flops_of_a_trained_mtp_layer_match_a_layer_and_a_head():
    """The layer counts as one of the model's layers, with a projection; the output weight has no gradient."""
    sizes = SIZES | MODELS["llama"] | {"model_type": "llama"}
    deeper = sizes | {"num_hidden_layers": sizes["num_hidden_layers"] + 1}
    tokens = dict(num_tokens=24, num_scored=10, num_attended=24**2)
    shape, layer = ModelShape.of(sizes), training_flops(ModelShape.of(deeper), **tokens)
    projection, head = 3 * 2 * 2 * shape.hidden**2 * 24, 2 * 2 * shape.vocab * shape.hidden * 10
    found = training_flops(replace(shape, mtp_layers=1, trains_mtp=True), **tokens)
    assert found == pytest.approx(layer + projection + head)
    assert training_flops(replace(shape, mtp_layers=1), **tokens) == training_flops(shape, **tokens)


def test_flops_of_gated_delta_nets_match_torchs_counts():
    """The delta rule's own products are left out: torch would count those of the chunked form."""
    sizes = SIZES | dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
    sizes |= dict(linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=None)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, attn_implementation="eager"))
    shape, num_tokens = ModelShape.of(sizes | {"model_type": "qwen3_5_text"}), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("linear_attn"):
                module.forward = lambda hidden_states, module=module, **_: projections(module, hidden_states)
        model(torch.arange(num_tokens)[None])
    linear = shape.linear
    products = 2 * 3 * linear.key_dim * linear.values * sum(linear.layers) * num_tokens
    ours = forward_flops(shape, num_tokens, num_tokens, num_attended=num_tokens**2)
    assert ours - products == pytest.approx(counter.get_total_flops(), rel=0.01)


def projections(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the layer's output without the delta rule."""
    mixed = layer.conv1d(layer.in_proj_qkv(hidden).mT)[..., : hidden.shape[1]].mT
    gate = layer.in_proj_z(hidden) + (layer.in_proj_a(hidden) + layer.in_proj_b(hidden)).sum() + mixed.sum()
    return layer.out_proj(gate)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_flops_of_a_vision_tower_match_torch(kind: tiny_vision.Kind, tmp_path: Path) -> None:
    """Two images of 8 × 8 patches. Qwen2.5-VL's windows have 4 × 4 patches in two of three layers."""
    folder = tiny_vision.build(tmp_path, kind)
    vision = vision_of(add_vision(read_config(folder)))
    assert vision is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    tower = model.model.visual
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.zeros(128, vision.patch_dim), grid_thw=torch.tensor([[1, 8, 8]] * 2))
    assert vision_flops(vision, 32, 16) == 2 * image_flops(vision, (1, 8, 8)) == counter.get_total_flops()


GRIDS = [(1, 8, 8), (1, 2, 6), (1, 10, 14)]
"""Grids of images that windows of 4 × 4 patches divide evenly, do not fill, and divide with a remainder."""


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_flops_of_images_match_torch(kind: tiny_vision.Kind, is_trained: bool, tmp_path: Path) -> None:
    """A frozen tower runs no backward pass, and no tower computes the gradient of the pixels."""
    folder = tiny_vision.build(tmp_path, kind)
    vision = vision_of(add_vision(read_config(folder)))
    assert vision is not None
    tower = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").model.visual
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(is_trained):
        output = tower(torch.zeros(sum(map(prod, GRIDS)), vision.patch_dim), grid_thw=torch.tensor(GRIDS))
        if is_trained:
            features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
            torch.stack(features).sum().backward()
    assert sum(image_flops(vision, grid, is_trained) for grid in GRIDS) == counter.get_total_flops()
