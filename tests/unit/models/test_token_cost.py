"""Relative costs compared with torch's FLOP counts for models of transformers."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.data.packing import Lengths, bundle, schedule
from megarl.models.flops import forward_flops, image_flops, mean_context, training_flops
from megarl.models.folder import read_config
from megarl.models.huggingface import WindowedAttention
from megarl.models.shape import ModelShape
from megarl.models.token_cost import TokenCost
from megarl.models.vision import add_vision, without_vision
from tests import tiny_vision
from tests.packing import packing

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
    # The backbone takes linear · T + pair · T² operations, and the head scored · T. Eager attention computes all pairs.
    few, many = operations(model.model, 8), operations(model.model, 16)
    pair = (many - 2 * few) / (16**2 - 2 * 8**2)
    linear = (few - 8**2 * pair) / 8
    scored = (operations(model, 8) - few) / 8
    assert cost.attended == pytest.approx(pair / linear)
    assert cost.scored == pytest.approx(scored / linear)


GPT_OSS = COMMON | dict(model_type="gpt_oss", head_dim=8, sliding_window=4)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 30])
@pytest.mark.parametrize("num_layers", [4, 5])
def test_pairs_outside_a_window_are_not_counted(num_tokens, num_layers):
    """Every second layer has a window of 4 tokens, beginning with the first."""
    config, windowed = GPT_OSS | dict(num_hidden_layers=num_layers), (num_layers + 1) // 2
    full = sum(range(1, num_tokens + 1))
    within = sum(min(query, 4) for query in range(1, num_tokens + 1))
    cost, pairs = TokenCost.of_model(config), ((num_layers - windowed) * full + windowed * within) / num_layers
    assert cost.pairs(num_tokens) == pytest.approx(pairs)
    # Each layer has two attention products, with 6 heads of 8 channels.
    flops = forward_flops(ModelShape.of(config), 0, 0, cost.pairs(num_tokens))
    assert flops == pytest.approx(2 * 2 * 48 * num_layers * pairs)
    last = ((num_layers - windowed) * num_tokens + windowed * min(num_tokens, 4)) / num_layers
    assert mean_context(ModelShape.of(config).windows, num_tokens) == pytest.approx(last)


def test_samples_beyond_the_window_cost_less():
    """The cost by which ranks are balanced counts the pairs of each sample."""
    cost = TokenCost(1.0, 0.0, WindowedAttention(4, (True, False)))
    [item] = bundle([Lengths("a", 3, 4), Lengths("a", 3, 1)], packing(cost=cost))
    full, within = 28 + 10, (1 + 2 + 3 + 4 * 4) + 10
    assert item.cost == 8 + (full + within) / 2


def test_token_cost_counts_only_active_experts():
    config = COMMON | dict(model_type="qwen3_moe", head_dim=8, moe_intermediate_size=20, num_experts_per_tok=4)
    few, many = (TokenCost.of_model(config | dict(num_experts=count)) for count in (8, 64))
    dense = TokenCost.of_model(COMMON | dict(model_type="qwen3", head_dim=8))  # width 80 = 4 active experts · 20
    assert few == many == dense


def test_cost_of_images_is_relative_to_a_token(tmp_path: Path) -> None:
    """Each of a replica's four ranks does a quarter of the token work, but encodes all images."""
    config = add_vision(read_config(tiny_vision.build(tmp_path, "qwen3_vl")))
    shape, grids = ModelShape.of(config), [(1, 8, 8), (1, 2, 6)]
    assert shape.vision is not None
    images = sum(image_flops(shape.vision, grid, trains_tower=True) for grid in grids)
    cost = TokenCost.of_model(config, trains_tower=True, num_ranks=4)
    assert cost.of_images(grids) == pytest.approx(images / (training_flops(shape, 1, 0, 0) / 4))
    assert TokenCost.of_model(config, num_ranks=4).of_images(grids) < cost.of_images(grids) / 2.5
    assert TokenCost.of_model(without_vision(config)).of_images(grids) == 0


def test_ranks_are_balanced_by_their_images(tmp_path: Path) -> None:
    """Two of four prompts with equal numbers of tokens have a large image, which their samples share."""
    cost = TokenCost.of_model(add_vision(read_config(tiny_vision.build(tmp_path, "qwen3_vl"))))
    images = ((1, 40, 40),)
    lengths = [Lengths(name, 20, 10, grids) for name, grids in zip("abcd", (images, images, (), ()), strict=True)]
    ranks = schedule(lengths, packing(token_budget=60, num_ranks=2, cost=cost))
    assert sorted(sorted(len(lengths[i].patch_grids) for part in rank for i in part) for rank in ranks) == [[0, 1]] * 2


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_samples_of_a_prompt_share_its_images(shares_prompts: bool, tmp_path: Path) -> None:
    """A microbatch encodes an image once, even if its samples do not share the prompt's tokens."""
    cost = TokenCost.of_model(add_vision(read_config(tiny_vision.build(tmp_path, "qwen3_vl"))))
    with_image, text = Lengths("a", 20, 10, ((1, 40, 40),)), Lengths("b", 20, 10)
    requirements = packing(cost=cost, shares_prompts=shares_prompts)
    [one], [three] = (bundle([with_image] * count, requirements) for count in (1, 3))
    num_tokens = 20 + 3 * 10 if shares_prompts else 3 * 30
    assert (three.samples, three.num_tokens) == ((0, 1, 2), num_tokens)
    expected = cost.of(num_tokens, 30, 3 * cost.pairs(30)) + cost.of_images(with_image.patch_grids)
    assert three.cost == pytest.approx(expected) and one.cost > cost.of_images(with_image.patch_grids)
    assert [item.samples for item in bundle([with_image] * 4, requirements)] == (
        [(0, 1, 2, 3)] if shares_prompts else [(0, 1, 2), (3,)]
    )
    assert len(bundle([text] * 3, requirements)) == (1 if shares_prompts else 3)
