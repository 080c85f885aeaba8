"""The vision tower in plans: its share of prompts, time and memory."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from megarl.cluster.memory.parameters import ModelParameters, Models
from megarl.cluster.memory.reserves import FEATURES, TOWER, sampling_reserve
from megarl.cluster.memory.vision import tower_bytes, tower_pass_bytes, towers_in_flight
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.images import ImageProcessor
from megarl.models.flops import vision_flops
from megarl.models.folder import read_config
from megarl.models.vision import add_vision, vision_of, without_vision
from megarl.planner.hardware import DENSE_SHARE, read_cluster
from megarl.planner.phases import host_parts, phase_loads
from megarl.planner.rollout_time import engine_step_seconds
from megarl.planner.train_time import train_time
from megarl.planner.workload import TextWorkload, image_features, workload_of
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
        (["data.min_pixels=1048576"], 32 * 32),
        (["data.image_column=null", "data.max_pixels=null"], 0),
        (["data.image_column=null", "environment.class=calculator", "rewards.functions=[]"], 24 * 24),
    ],
)
def test_prompts_include_an_image(keys: list[str], features: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, *keys)
    assert image_features(config, MODEL.shape) == features
    workload = workload_of(config, MODEL.shape)
    assert workload.prompt_tokens == 512 + features
    assert (f"(including {features:,} for one assumed image)" in workload.describe()) == (features > 0)


@pytest.mark.parametrize(("first_stage_layers", "share"), [(30, 1), (6, 0)])
def test_tower_takes_time_on_the_first_stage_only(tmp_path: Path, first_stage_layers: int, share: int) -> None:
    """The slower of two stages, which has 30 of 36 layers, determines the time. Each rank of the first stage computes
    all features of its replica's microbatch."""
    layout = f"actor.layout={{tp: 2, pp: 2, dp: 2, first_stage_layers: {first_stage_layers}}}"
    config, cluster = config_of(tmp_path, layout), read_cluster("8xH100")
    workload = workload_of(config, MODEL.shape)
    assert isinstance(workload, TextWorkload) and MODEL.shape.vision is not None
    with_images = train_time(config.actor, MODEL, workload, cluster, 2, 0, 1)
    packed = workload.packed(config.actor)
    forward = vision_flops(MODEL.shape.vision, packed.features, 576) / (cluster.gpu.tflops * 1e12 * DENSE_SHARE)
    seconds = share * 3 * workload.updates * packed.microbatches * forward
    assert with_images.update.get("vision tower", 0.0) == pytest.approx(seconds)
    without = train_time(config.actor, MODEL, replace(workload, image_features=0.0), cluster, 2, 0, 1)
    affected = {"vision tower": 0, "recomputation": 0, "pipeline bubble": 0}
    others = [times.update | affected for times in (with_images, without)]
    assert others[0] == pytest.approx(others[1])
    assert share or with_images.update == without.update


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_kept_activations_of_a_tower_match_torch(kind: tiny_vision.Kind, tmp_path: Path) -> None:
    """Compare with the tensors, except weights, that torch saves for the backward pass of four images of 32 × 32
    patches."""
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
    planned, recomputed = (tower_bytes(vision, layout_of(), 1024, 1, 4, recompute) for recompute in ("none", "full"))
    assert planned == pytest.approx(kept, rel=0.15)
    assert tower_pass_bytes(vision, 1024, 4) < recomputed < planned


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 4), (2, 1, 4), (4, 1, 3), (2, 2, 8), (2, 3, 8), (4, 2, 8), (4, 2, 3), (3, 4, 9)]
)
def test_towers_in_flight_match_the_schedule(pp: int, vpp: int, count: int) -> None:
    """Enumerate the first stage's forward and backward passes of (chunk, microbatch)."""
    forward = [
        (chunk, number)
        for first in range(0, count, pp)
        for chunk in range(vpp)
        for number in range(first, min(first + pp, count))
    ]
    warmup = pp - 1 if vpp == 1 else 2 * (pp - 1) + (vpp - 1) * pp
    held = most = 0
    backward = iter([(vpp - 1 - chunk, number) for chunk, number in forward])
    for step, (chunk, _) in enumerate(forward):
        held += chunk == 0
        most = max(most, held)
        if step >= warmup:
            held -= next(backward)[0] == 0
    assert towers_in_flight(layout_of(pp=pp, vpp=vpp), count) == most


def test_microbatches_contain_the_prompts_features(tmp_path: Path) -> None:
    """Two samples share a prompt if the budget is 4,096 tokens: 1,088 of the prompt and 2 × 1,000 of responses leave
    too few for a third."""
    config = config_of(tmp_path, "actor.layout={tp: 8, dp: 1}", "rollout.replicas=4")
    workload = workload_of(config, MODEL.shape, 1088, 1000)
    assert isinstance(workload, TextWorkload)
    packed = replace(workload, trained=1024, updates=1).packed(
        config.actor.model_copy(update={"tokens_per_microbatch": 3088})
    )
    # 1,024 samples in pairs: 512 prompts, and 512 · (1,088 + 2 · 1,000) tokens in 512 microbatches
    assert (packed.microbatches, packed.features, packed.tokens) == (512, 576, 3088)
    assert packed.most_features == pytest.approx(3088 * 576 / 1088)


def test_frozen_tower_runs_forward_only(tmp_path: Path) -> None:
    config, cluster = config_of(tmp_path), read_cluster("8xH100")
    frozen = config_of(tmp_path, "actor.frozen=[model.visual.*]")
    workload = workload_of(config, MODEL.shape)
    seconds = [
        train_time(each.actor, MODEL, workload, cluster, 2, 0, 1).update["vision tower"] for each in (config, frozen)
    ]
    assert seconds[0] == pytest.approx(3 * seconds[1])
    loads = [
        next(
            load
            for load in phase_loads(each, Models({"actor": MODEL}), workload, cluster)
            if "actor trains" in load.phase
        )
        for each in (config, frozen)
    ]
    assert loads[1].parts["activations"] < loads[0].parts["activations"]


def test_engine_memory_includes_image_features(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    vision = MODEL.shape.vision
    assert vision is not None
    items = sampling_reserve(config, MODEL.shape)
    # 16,384 tokens in a batch, hidden size 4,096; one main and three deepstack features, with buffers for the latter
    assert items[FEATURES] == 16384 * 4096 * 2 * (1 + 3 + 3)
    assert items[TOWER] == tower_pass_bytes(vision, 16384, 2)
    assert (
        not {FEATURES, TOWER} & sampling_reserve(config, ModelParameters(without_vision(RECIPE.hf_config)).shape).keys()
    )


@pytest.mark.parametrize(
    ("layout", "num_samples", "prompts", "ranks"),
    [("{tp: 8, dp: 1}", 2, 64, 8), ("{pp: 2, tp: 2, dp: 2}", 2, 64, 4), ("{tp: 2, dp: 4}", 2, 32, 8)],
)
def test_host_memory_includes_patches(layout: str, num_samples: int, prompts: int, ranks: int, tmp_path: Path) -> None:
    """Each rank of the first stage keeps the patches of its replica's images, one of 576 features per prompt. The
    samples of a prompt can be on different replicas."""
    batch = f"batch={{prompts_per_step: 64, prompts_per_update: 64, samples_per_prompt: {num_samples}}}"
    config = config_of(tmp_path, f"actor.layout={layout}", "rollout.replicas=8", batch)
    workload = workload_of(config, MODEL.shape)
    parts = host_parts(config, Models({"actor": MODEL}), workload, read_cluster("8xH100"))
    source = io.BytesIO()
    Image.new("RGB", (768, 768)).save(source, "png")
    folder = tiny_vision.build(tmp_path / "tiny", "qwen3_vl")
    image = ImageProcessor.of(folder, max_pixels=768**2).patches([source.getvalue()])
    assert image.dtype == np.float32
    assert parts["actor: patches of images"] == ranks * prompts * image.nbytes
    text = config_of(tmp_path, "data.image_column=null", "data.max_pixels=null")
    without = host_parts(text, Models({"actor": MODEL}), workload_of(text, MODEL.shape), read_cluster("8xH100"))
    assert "actor: patches of images" not in without


def test_decoding_does_not_read_the_tower(tmp_path: Path) -> None:
    config, cluster = config_of(tmp_path), read_cluster("8xH100")
    seconds = [
        engine_step_seconds(config, ModelParameters(hf_config), cluster, 1000)(1)
        for hf_config in (RECIPE.hf_config, without_vision(RECIPE.hf_config))
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
