"""Adapters of an image model in diffusers' format: pipelines that load them draw the images of the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megarl.config.schema import Config
from megarl.core.checkpoint import FileRecord
from megarl.megatron.checkpoint.adapters import adapters_to_huggingface, adapters_to_peft
from megarl.megatron.checkpoint.conversion import Options
from megarl.megatron.model.build import adapter_parameters
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.models.folder import read_config
from megarl.models.peft import DIFFUSERS
from megarl.models.weights_hash import weights_hash
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.run.checkpoints import Checkpoints
from tests.closeness import assert_close, assert_matches, expected, relative_error
from tests.distributed.test_image_updates import ALPHA, FLOW_GRPO, RANK, config_of, own_batches
from tests.forked import run_ranks
from tests.tiny_denoiser import write_denoiser_adapters
from tests.tiny_image_model import draw, load_pipeline, write_tiny_image_model

LORA = f"rank: {RANK}, alpha: {ALPHA}"


def export(store, rank: int, config: Config, folder: Path, out: Path, hidden: Path | None) -> list[FileRecord]:
    """Run an update, and write the export. With `hidden`, save a checkpoint in it and return its files."""
    transformer = folder / "transformer"
    worker = DenoiserWorker(config, transformer, rank, store, threads=1)
    worker.update(own_batches(config, worker)[0])
    worker.end_step()
    if config.actor.lora.export == "adapters":
        holder, target = worker.adapters.holder, worker.adapters.whole
    else:
        holder, target = worker.holder, huggingface_holder(read_config(transformer), "float32")
    worker.export(make_plan([holder], [target]), LocalMemory({holder.name: worker._exported_weights()}), out)
    if hidden is None:
        return []
    worker.save_checkpoint(hidden)
    return worker.finish_checkpoint(hidden)


def factors(store, rank: int, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    worker = DenoiserWorker(config, folder / "transformer", rank, store, threads=1)
    return {name: factor.detach().clone() for name, factor in adapter_parameters(worker.chunks).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with an image model, the exports `merged` and `adapters` of two equal runs, and a checkpoint."""
    path = tmp_path_factory.mktemp("runs")
    folder = write_tiny_image_model(path / "model")
    start = write_denoiser_adapters(path / "start", folder / "transformer", RANK, ALPHA)
    checkpoints = Checkpoints(path / "checkpoints")
    hidden = checkpoints.begin(1)
    (hidden / "actor").mkdir()
    for kind, saved in (("merged", None), ("adapters", hidden)):
        config = config_of(folder, *FLOW_GRPO, f"actor.lora={{{LORA}, path: {start}, export: {kind}}}")
        [files] = run_ranks(1, export, config, folder, path / kind, saved)
    identity = {"folder": str(folder), "hash": weights_hash(folder / "transformer")}
    checkpoints.commit(1, {"config": config.model_dump(), "models": {"model.path": identity}}, files)
    return path


NOISE = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(0))


def images(pipeline) -> torch.Tensor:
    """Return the pixels of two images from fixed noise, in [0, 1]."""
    keys = dict(height=16, width=24, num_inference_steps=4, guidance_scale=2.0, max_sequence_length=96)
    noise = NOISE.to(torch.get_default_dtype())
    return draw(pipeline, prompt=["two cats", "a dog"], **keys, latents=noise, output_type="pt")


def test_pipeline_with_adapters_draws_the_merged_models_images(runs):
    adapted = load_pipeline(runs / "model")
    before = images(adapted)
    adapted.load_lora_weights(runs / "adapters")
    found = images(adapted)
    assert_matches({"images": found}, lambda: {"images": images(load_pipeline(runs / "merged"))}, "merged")
    assert relative_error(before, found) > 0.01


def test_exported_file_has_diffusers_names_and_metadata(runs):
    assert [path.name for path in (runs / "adapters").iterdir()] == ["pytorch_lora_weights.safetensors"]
    pipeline = load_pipeline(runs / "model")
    pipeline.load_lora_weights(runs / "adapters", adapter_name="ours")
    pipeline.save_lora_weights(
        runs / "theirs",
        {name: p for name, p in pipeline.transformer.named_parameters() if "lora_" in name},
        transformer_lora_adapter_metadata=pipeline.transformer.peft_config["ours"].to_dict(),
    )
    ours, theirs = (safe_open(runs / folder / DIFFUSERS.weights, "pt") for folder in ("adapters", "theirs"))
    names, their_names = set(ours.keys()), set(theirs.keys())
    assert names == {name.replace(".ours.", ".") for name in their_names}
    config, theirs_config = (json.loads(file.metadata()["lora_adapter_metadata"]) for file in (ours, theirs))
    assert config.items() >= {"transformer.r": RANK, "transformer.lora_alpha": ALPHA}.items()
    assert config.keys() <= theirs_config.keys()
    # PEFT adapts a layer if its name ends with one of the targets.
    targets = tuple(f".{target}" for target in config["transformer.target_modules"])
    adapted = load_pipeline(runs / "model").transformer
    linear = [name for name, module in adapted.named_modules() if isinstance(module, torch.nn.Linear)]
    found = {f"transformer.{name}" for name in linear if name.endswith(targets)}
    assert found == {name.partition(".lora_")[0] for name in names}


def test_exported_adapters_start_another_run(runs):
    config = config_of(
        runs / "model", *FLOW_GRPO, f"actor.lora={{{LORA}, path: {runs / 'adapters'}}}", "actor.layout.tp=2"
    )
    ranks = run_ranks(2, factors, config, runs / "model")
    stored = load_file(runs / "adapters" / DIFFUSERS.weights)
    loaded = ranks[0]["chunk0.decoder.layers.1.mlp.linear_fc2.adapter.lora_B.weight"]
    assert torch.equal(loaded, stored["transformer.layers.1.feed_forward.w2.lora_B.weight"])


def test_converted_checkpoint_equals_the_exports(runs):
    checkpoint = Checkpoints(runs / "checkpoints").latest()
    adapters_to_peft(checkpoint, runs / "converted")
    exported, converted = (safe_open(runs / folder / DIFFUSERS.weights, "pt") for folder in ("adapters", "converted"))
    assert converted.metadata() == exported.metadata()
    names = set(exported.keys())
    assert set(converted.keys()) == names
    assert all(torch.equal(converted.get_tensor(name), exported.get_tensor(name)) for name in names)
    adapters_to_huggingface(checkpoint, runs / "transformer", Options())

    def fused() -> dict[str, torch.Tensor]:
        pipeline = load_pipeline(runs / "model")
        pipeline.load_lora_weights(runs / "adapters")
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        return pipeline.transformer.state_dict()

    reference = expected(fused)
    for folder in (runs / "transformer", runs / "merged" / "transformer"):
        found = load_file(folder / "diffusion_pytorch_model.safetensors")
        assert found.keys() == reference.exact.keys()
        assert_close(found, *reference, folder.name)
