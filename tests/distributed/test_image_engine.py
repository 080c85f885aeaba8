"""The image engine against the trainer: refits from Megatron's shards, velocities at canaries and log-probs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.transition import guided, log_prob, transition
from megarl.core.latents import LatentSample, canaries
from megarl.core.prompt import Prompt
from megarl.megatron import denoiser_step, parallel
from megarl.megatron.model.build import named_weights
from megarl.megatron.model.denoiser.build import build_denoiser
from megarl.megatron.model.denoiser.inputs import Document
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.models.denoiser import DenoiserShape
from megarl.models.folder import read_config
from megarl.resharding.execute import execute
from megarl.resharding.families import diffusers_holders, huggingface_holder, megatron_holders
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.shared_memory import SharedMemory, publish
from megarl.resharding.verification import regions, source_checksums
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.diffusers.request import Denoising, ImageRequest
from tests.closeness import TOLERANCE, relative_error
from tests.distributed.test_image_updates import ALPHA, FLOW_GRPO, RANK, own_batches
from tests.distributed.test_image_updates import config_of as image_config
from tests.forked import run_ranks
from tests.marks import each_value
from tests.parity import config_of
from tests.timing import WAIT_S
from tests.tiny_denoiser import MODELS, TARGETS, write_denoiser_adapters
from tests.tiny_image_model import SHIFT, write_tiny_image_model

GUIDANCE = 2.5


def velocities(chunks, documents: list[Document]) -> list[torch.Tensor]:
    return [v for part in denoiser_step.predict(chunks, [documents]) for v in part]


def trained_log_probs(chunks, denoising: Denoising, sample: LatentSample) -> np.ndarray:
    """Return the trainer's log-probs of a sample's trained steps."""
    latents = torch.tensor(sample.latents)
    documents = [
        Document(x, sample.sigmas[step], branch.map(torch.tensor))
        for x, step in zip(latents, sample.steps, strict=False)
        for branch in (sample.embedding, sample.empty_embedding)
    ]
    found = velocities(chunks, documents)
    v = guided(torch.stack(found[::2]), torch.stack(found[1::2]), denoising.guidance)
    sigmas = torch.tensor(sample.sigmas)
    second = sigmas[1].expand(len(sample.steps))
    steps = torch.tensor(sample.steps).long()
    step = transition(denoising.kind, denoising.noise_level, sigmas[steps], sigmas[steps + 1], second)
    return log_prob(step, latents[:-1], v, latents[1:]).numpy()


def connect(
    engine: DiffusersEngine,
    config: Mapping[str, Any],
    holder: Holder,
    published: Mapping[str, torch.Tensor],
    dtype: str = "float32",
) -> Callable[[int, Mapping[str, torch.Tensor]], None]:
    """Connect the engine to the tensors in `published`. Return a function that copies weights there and refits the
    engine, with checksums."""
    targets = diffusers_holders(config, 1, dtype)
    channel = SharedMemory({holder.name: publish(published)})
    engine.connect(CompactPlan.of(make_plan([holder], targets)), channel, targets, by_loader=False)
    export = make_plan([holder], [huggingface_holder(config, dtype)])

    def refit(version: int, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            published[name].copy_(weight)
        engine.refit(version, source_checksums(regions(targets), export, holder.name, weights))

    return refit


def run(
    store, rank: int, shape: DenoiserShape, folder: Path, kind: str, noise_level: float
) -> tuple[list[float], list[float]]:
    """Refit the engine twice from a Megatron rank. Return the worst error of the velocities at the canaries, and of the
    ratios of sampled latents, after each refit."""
    settings = config_of(folder / "transformer").actor
    config = json.loads((folder / "transformer" / "config.json").read_text())
    parallel.initialize(settings.layout, store, rank, seed=0, timeout_s=WAIT_S)
    chunks = build_denoiser(settings, config, torch.float32)
    weights = named_weights(chunks)
    [holder] = megatron_holders(config, settings.layout)
    files = huggingface_holder(config)
    with SafetensorsFolder(folder / "transformer") as transport:
        execute(make_plan([files], [holder]).into(holder.name), weights, transport)

    engine = DiffusersEngine(folder, "float32", max_batch=3)
    published = {name: torch.empty_like(weight) for name, weight in weights.items()}
    refit = connect(engine, config, holder, published)
    denoising = Denoising(
        height=16,
        width=24,
        num_steps=6,
        shift=SHIFT,
        guidance=GUIDANCE,
        kind=kind,
        noise_level=noise_level,
        sde_steps=range(0, 5),
    )
    requests = [
        ImageRequest(sample_id=f"0.0.{i}", prompt=Prompt("0", "a red cat", ()), seed=3, denoising=denoising)
        for i in range(4)
    ]
    errors, ratios = [], []
    for version in (1, 2):
        for weight in weights.values():
            weight.mul_(1.1)
        refit(version, weights)
        inputs = canaries(shape.channels, shape.caption, shape.patch, shape.pooled)
        documents = [Document(torch.tensor(c.latents), c.sigma, c.caption.map(torch.tensor)) for c in inputs]
        pairs = zip(engine.velocities(inputs), velocities(chunks, documents), strict=True)
        errors.append(max(relative_error(torch.tensor(actual), reference) for actual, reference in pairs))
        ratios.append(0.0)
        for sample in asyncio.run(engine.generate(requests)):
            trained = trained_log_probs(chunks, denoising, sample)
            ratios[-1] = max(ratios[-1], np.abs(np.expm1(trained - sample.logprobs)).max())
    return errors, ratios


@pytest.mark.parametrize(("name", "noise"), each_value(tuple(MODELS), (("flow", 0.7), ("dance", 0.3), ("cps", 0.6))))
def test_trainer_matches_engine_after_two_refits(tmp_path, name, noise):
    folder = write_tiny_image_model(tmp_path, name)
    [(errors, ratios)] = run_ranks(1, run, MODELS[name].shape, folder, *noise)
    print(errors, ratios)
    assert max(errors) < TOLERANCE
    assert max(ratios) < TOLERANCE


def refit_adapters(store, rank: int, folder: Path, adapters: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Refit the engine from a model with adapters, before and after an update of the factors. Return the checksums of
    its weights after each refit, and those of a fresh engine that loads the merged model."""
    lora = f"actor.lora={{rank: {RANK}, alpha: {ALPHA}, path: {adapters}}}"
    config, transformer = image_config(folder, *FLOW_GRPO, lora), folder / "transformer"
    worker = DenoiserWorker(config, transformer, rank, store, threads=1)
    engine = DiffusersEngine(folder, "float32", max_batch=3)
    published = {name: torch.empty_like(weight) for name, weight in worker._refit_weights.items()}
    refit = connect(engine, read_config(transformer), worker.holder, published)
    checksums = []
    for version, batch in enumerate(own_batches(config, worker)):
        worker.prepare_refit()
        refit(version, worker._refit_weights)
        checksums.append(engine.checksums()[0])
        worker.update(batch)
        worker.end_step()
    worker.prepare_refit()
    refit(2, worker._refit_weights)
    plan = make_plan([worker.holder], [huggingface_holder(read_config(transformer), "float32")])
    out = adapters.with_name("merged")
    worker.export(plan, LocalMemory({worker.holder.name: worker._exported_weights()}), out)
    [fresh] = DiffusersEngine(out, "float32", max_batch=3, loads_weights=True).checksums()
    return [*checksums, engine.checksums()[0]], fresh


def test_merged_adapters_match_a_fresh_engine(tmp_path):
    folder = write_tiny_image_model(tmp_path / "model")
    adapters = write_denoiser_adapters(tmp_path / "adapters", folder / "transformer", RANK, ALPHA)
    [(refitted, fresh)] = run_ranks(1, refit_adapters, folder, adapters)
    assert refitted[-1] == fresh
    first, second, third = refitted
    moved = {name for name in fresh if len({first[name], second[name], third[name]}) == 3}
    assert moved == {name for name in fresh if re.fullmatch(rf"{TARGETS}\.weight", name)}
    assert all(first[name] == third[name] for name in fresh.keys() - moved)
