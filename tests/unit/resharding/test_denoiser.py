"""Weights of image models in a diffusers folder and on Megatron ranks: names, shapes, and plans between them."""

from __future__ import annotations

from math import prod

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.model_schema import Layout
from megarl.core.errors import UserError
from megarl.megatron import parallel
from megarl.megatron.model.build import parameters_of
from megarl.megatron.model.denoiser.build import build_chunks, denoiser_config
from megarl.models.denoiser import DenoiserShape
from megarl.resharding.families import huggingface_holder, megatron_holder, megatron_holders
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.side import side_holders
from tests.published_models import (
    SD35_LARGE,
    SD35_LARGE_PARAMETERS,
    SD35_MEDIUM,
    SD35_MEDIUM_PARAMETERS,
    Z_IMAGE,
    Z_IMAGE_PARAMETERS,
)
from tests.tiny_denoiser import CONFIG
from tests.tiny_denoiser import STABLE_DIFFUSION_3 as SD3
from tests.unit.resharding.cases import layout_of
from tests.unit.resharding.megatron_world import base_config
from tests.unit.resharding.test_round_trip import assert_same, resharded

LAYOUTS = {
    "1 process": (CONFIG, layout_of()),
    "TP2, DP2": (CONFIG, layout_of(tp=2, dp=2)),
    "PP2, VPP2": (CONFIG, layout_of(pp=2, vpp=2)),
    "TP2, PP3, uneven": (CONFIG, layout_of(tp=2, pp=3, first=1, last=2)),
    "published: TP2, PP5": (Z_IMAGE, layout_of(tp=2, pp=5)),
    "published: TP5, PP3, VPP2": (Z_IMAGE, layout_of(tp=5, pp=3, vpp=2)),
    "SD3.5": (SD3, layout_of()),
    "SD3.5: TP2, DP2": (SD3, layout_of(tp=2, dp=2)),
    "SD3.5: PP2, VPP2": (SD3, layout_of(pp=2, vpp=2)),
    "SD3.5: TP2, PP3, uneven": (SD3, layout_of(tp=2, pp=3, first=1, last=2)),
    "SD3, without norms and second attention": (SD3 | dict(qk_norm=None, dual_attention_layers=[]), layout_of(tp=2)),
    "SD3.5 medium: TP4, PP3": (SD35_MEDIUM, layout_of(tp=4, pp=3)),
    "SD3.5 large: TP2, PP19": (SD35_LARGE, layout_of(tp=2, pp=19)),
}
PUBLISHED = {
    "Z-Image": (Z_IMAGE, Z_IMAGE_PARAMETERS, "tp=2,pp=5,dp=2"),
    "SD3.5 medium": (SD35_MEDIUM, SD35_MEDIUM_PARAMETERS, "tp=4,pp=3,dp=2"),
    "SD3.5 large": (SD35_LARGE, SD35_LARGE_PARAMETERS, "tp=2,pp=19"),
}


@pytest.mark.parametrize(
    "config",
    [CONFIG, Z_IMAGE, SD3, SD35_MEDIUM, SD35_LARGE],
    ids=["Z-Image, tiny", "Z-Image", "SD3.5, tiny", "medium", "large"],
)
def test_canonical_tensors_match_diffusers(config):
    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    assert huggingface_holder(config).shapes == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("case", LAYOUTS)
def test_holders_match_the_ranks(case):
    config, layout = LAYOUTS[case]
    settings = base_config().actor.model_copy(update={"layout": layout})
    for rank in range(layout.world_size):
        with parallel.simulated_rank(layout, rank), torch.device("meta"):
            chunks = build_chunks(denoiser_config(settings, config, torch.float32), config, layout.vpp)
        shapes = {name: tuple(p.shape) for name, p in parameters_of(chunks).items()}
        assert dict(megatron_holder(config, layout, rank).shapes) == shapes


layouts = st.sampled_from([layout for config, layout in LAYOUTS.values() if config is CONFIG])


@settings(max_examples=10)
@given(st.sampled_from([CONFIG, SD3]), layouts, layouts)
def test_weights_survive_resharding(config, first: Layout, second: Layout):
    """Weights move from a diffusers folder to Megatron, to another layout, and back. The diffusers class has the same
    names and shapes as the folder, so the last plan is also a refit's plan."""
    folder = huggingface_holder(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in folder.shapes.items()}
    holders, weights = [folder], {folder.name: tensors}
    for layout in (first, second):
        ranks = megatron_holders(config, layout)
        weights = resharded(holders, weights, ranks)
        holders = ranks
    assert_same(resharded(holders, weights, [folder])[folder.name], tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_of_published_model_is_correct(name):
    config, count, layout = PUBLISHED[name]
    assert sum(map(prod, huggingface_holder(config).shapes.values())) == count
    sources = side_holders("--from", layout, config, True)
    for target in ("hf", "diffusers:replicas=2"):
        destinations = side_holders("--to", target, config, False)
        check_plan(make_plan(sources, destinations), sources, destinations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "num_layers=0: expected a positive integer"),
        (dict(pos_embed_max_size=None), "pos_embed_max_size=None: expected a positive integer"),
        (dict(dual_attention_layers=3), "dual_attention_layers=3: expected a list of integers"),
        (dict(dual_attention_layers=[4]), r"dual_attention_layers=\[4\]: not supported"),
        (dict(caption_projection_dim=48), "caption_projection_dim=48: not supported for SD3Transformer2DModel"),
        (dict(out_channels=8, qk_norm="layer_norm"), "out_channels=8, qk_norm=layer_norm: not supported"),
    ],
)
def test_unsupported_stable_diffusion_3_config_is_rejected(change, message):
    with pytest.raises(UserError, match=message):
        DenoiserShape.of(SD3 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(_class_name="FluxTransformer2DModel"), "_class_name=FluxTransformer2DModel: not supported"),
        (dict(dim=0), "dim=0: expected a positive integer"),
        (dict(dim="48"), "dim='48': expected a positive integer"),
        (dict(axes_dims=48), "axes_dims=48: expected a list of positive integers"),
        (dict(all_patch_size=["2"]), r"all_patch_size=\['2'\]: expected a list of positive integers"),
        (dict(t_scale=None), "t_scale=None: expected a positive number"),
        (dict(siglip_feat_dim=8), "siglip_feat_dim=8: not supported for ZImageTransformer2DModel"),
        (dict(norm_eps=1e-6, qk_norm=False), "norm_eps=1e-06, qk_norm=False: not supported"),
        (dict(all_patch_size=[2, 4]), r"all_patch_size=\[2, 4\]: not supported"),
        (dict(axes_dims=[8, 8, 16]), r"axes_dims=\[8, 8, 16\]: not supported"),
    ],
)
def test_unsupported_config_is_rejected(change, message):
    with pytest.raises(UserError, match=message):
        DenoiserShape.of(CONFIG | change)


def test_indivisible_layout_is_rejected():
    with pytest.raises(UserError, match="tp=3: 2 attention heads are not divisible by 3"):
        megatron_holder(CONFIG, layout_of(tp=3), 0)
