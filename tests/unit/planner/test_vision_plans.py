"""The vision tower in plans: its share of prompts, time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.models.flops import vision_flops
from megarl.models.folder import read_config
from megarl.models.vision import add_vision, vision_of
from megarl.planner.hardware import DENSE_SHARE, read_cluster
from megarl.planner.phases import vision_bytes
from megarl.planner.train_time import train_time
from megarl.planner.workload import Packed, TextWorkload, image_features, workload_of
from tests import tiny_vision
from tests.h100_recipes import RECIPES
from tests.unit.resharding.cases import layout_of

[RECIPE] = [recipe for recipe in RECIPES if recipe.name == "qwen3-vl-8b-8xh100-grpo-images"]
MODEL = ModelParameters(RECIPE.hf_config)


def config_of(folder: Path, *keys: str) -> Config:
    return load(RECIPE.file, [*RECIPE.overrides(folder), *keys])


@pytest.mark.parametrize(
    ("keys", "features"),
    [
        ([], 24 * 24),  # 768 × 768 pixels; a feature has 2 × 2 patches of 16 × 16 pixels
        (["data.max_pixels=65536"], 8 * 8),
        (["data.max_pixels=4096"], 2 * 2),
        (["data.image_column=null", "data.max_pixels=null"], 0),
    ],
)
def test_prompts_include_an_image(keys: list[str], features: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, *keys)
    assert image_features(config, MODEL.shape) == features
    workload = workload_of(config, MODEL.shape)
    assert workload.prompt_tokens == 512 + features
    assert ("for the assumed image" in workload.describe()) == (features > 0)
    packed = workload.packed(config.actor)
    prompts = 128 / workload.updates / config.actor.layout.dp
    copies = packed.features * packed.microbatches / max(features, 1) / prompts
    assert copies >= 1 or features == 0  # microbatches may have copies of a prompt
    assert copies == 0 or packed.features <= packed.tokens


def test_tower_takes_time_on_the_first_stage_only(tmp_path: Path) -> None:
    """Each rank of the stage computes all features of its replica's microbatch."""
    config, cluster = config_of(tmp_path), read_cluster("8xH100")
    workload = workload_of(config, MODEL.shape)
    assert isinstance(workload, TextWorkload) and MODEL.shape.vision is not None
    with_images = train_time(config.actor, MODEL, workload, cluster, 2, 0, 1)
    packed = workload.packed(config.actor)
    forward = vision_flops(MODEL.shape.vision, packed.features, 576) / (cluster.gpu.tflops * 1e12 * DENSE_SHARE)
    assert with_images.update["vision tower"] == pytest.approx(3 * workload.updates * packed.microbatches * forward)
    without = train_time(config.actor, MODEL, replace(workload, image_features=0.0), cluster, 2, 0, 1)
    others = [times.update | {"vision tower": 0, "recomputation": 0} for times in (with_images, without)]
    assert others[0] == pytest.approx(others[1])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_kept_activations_of_a_tower_match_torch(kind: tiny_vision.Kind, tmp_path: Path) -> None:
    """Tensors saved for the backward pass of four images of 32 × 32 patches, without weights."""
    folder = tiny_vision.build(tmp_path, kind, tower=dict(depth=8, intermediate_size=160))
    vision = vision_of(add_vision(read_config(folder)))
    assert vision is not None
    tower = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").model.visual
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        tower(torch.zeros(4096, vision.patch_dim), grid_thw=torch.tensor([[1, 32, 32]] * 4))
    kept = sum(storage.nbytes() for storage in saved.values())
    packed = Packed(1, 0.0, 0.0, 0.0, features=1024, image_features=256)
    planned, _ = vision_bytes(vision, layout_of(), packed, 4, "none")
    assert planned == pytest.approx(kept, rel=0.15)
    recomputed, passing = vision_bytes(vision, layout_of(), packed, 4, "full")
    assert passing < recomputed < planned
