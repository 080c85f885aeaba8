"""The number of parameters of a rank against the GPTModel that Megatron builds for it."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings

from megarl.cluster.memory.parameters import ModelParameters
from tests.published_models import CONFIGS, PARAMETERS
from tests.unit.resharding.cases import BIASED_ROUTERS, configs, layout_of, with_fitting_tower
from tests.unit.resharding.megatron_world import real_rank


@settings(max_examples=12)
@given(configs())
def test_counts_match_the_real_model_in_random_layouts(case):
    """Covers uneven and virtual pipeline stages, and distributed and sharded experts. The counts of a stage apply to
    all its ranks."""
    config, layout, _ = case
    # Use even sizes, because Megatron's rotary embedding requires an even number of channels.
    even = {name: 2 * config[name] for name in ("hidden_size", "head_dim", "qk_rope_head_dim") if name in config}
    epsilon = 1e-5 if config["model_type"] == "gpt_oss" else 1e-6
    config = with_fitting_tower(config | even | {"num_experts_per_tok": 2, "rms_norm_eps": epsilon})
    if config["model_type"] not in ("mixtral", "qwen3_moe", *BIASED_ROUTERS):
        layout = layout.model_copy(update={"ep": 1, "etp": None})
    model = ModelParameters(config)
    ranks = layout.tp * layout.cp * layout.dp
    for stage in range(layout.pp):
        held = model.of_stage(layout, stage)
        for rank in {stage * ranks, (stage + 1) * ranks - 1}:
            shapes = real_rank(config, layout, rank).shapes
            assert held.count == sum(map(prod, shapes.values())), (layout, rank)
            assert held.experts == sum(prod(shape) for name, shape in shapes.items() if ".mlp.experts." in name)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-32B", "DeepSeek-V3", "Kimi-K2", "GLM-4.6", "gpt-oss-20b"])
def test_ranks_together_hold_a_published_model_once(name):
    """The sum also contains the vocabulary's padding and the parameters that every rank holds: norms, routers and
    projections to latents."""
    layout = layout_of(tp=4, pp=4, dp=2, ep=8 if CONFIGS[name].get("num_experts_per_tok") else 1, etp=1, last=None)
    layout = layout if layout.ep > 1 else layout.model_copy(update={"etp": None})
    if name in ("DeepSeek-V3", "Kimi-K2"):
        layout = layout.model_copy(update={"last_stage_layers": 13})
    model = ModelParameters(CONFIGS[name])
    held = [model.of_stage(layout, stage) for stage in range(4)]
    total = sum(4 * (one.count - one.experts) + 8 * one.experts for one in held)
    assert model.count == PARAMETERS[name]
    assert PARAMETERS[name] <= total <= 1.05 * PARAMETERS[name]
    assert sum(len(one.layers) for one in held) == model.shape.num_layers
    assert [one.is_last for one in held] == [False, False, False, True]
