"""The image engine against the trainer: refits from Megatron's shards, velocities at canaries and log-probs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.transition import guided, log_prob, transition
from megarl.core.latents import Conditioning, LatentSample, VelocityInput, canaries
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
from tests.closeness import assert_close, expected
from tests.distributed.test_image_updates import ALPHA, FLOW_GRPO, RANK, own_batches
from tests.distributed.test_image_updates import config_of as image_config
from tests.forked import run_ranks
from tests.marks import each_value
from tests.parity import config_of
from tests.timing import WAIT_S
from tests.tiny_denoiser import MODELS, TARGETS, write_denoiser_adapters
from tests.tiny_image_model import SHIFT, write_tiny_image_model

GROWTH = 1.1
"""Factor of the weights in each refit."""

DENOISING = Denoising(height=16, width=24, num_steps=6, shift=SHIFT, guidance=2.5, sde_steps=range(5))

Velocities = Callable[[list[Document]], Sequence[torch.Tensor]]


def results(
    velocities: Velocities, inputs: Sequence[VelocityInput], denoising: Denoising, samples: Sequence[LatentSample]
) -> dict[str, torch.Tensor]:
    """Return the velocities at the inputs, and the log-probs of the samples' trained steps, in the default dtype."""
    dtype = torch.get_default_dtype()

    def document(latents: np.ndarray, sigma: float, caption: Conditioning[np.ndarray]) -> Document:
        return Document(torch.tensor(latents, dtype=dtype), sigma, caption.map(torch.tensor).to(dtype))

    predicted = velocities([document(item.latents, item.sigma, item.caption) for item in inputs])
    found = {f"velocity {number}": v for number, v in enumerate(predicted)}
    for sample in samples:
        branches, steps = (sample.embedding, sample.empty_embedding), torch.tensor(sample.steps).long()
        latents, sigmas = torch.tensor(sample.latents).to(dtype), torch.tensor(sample.sigmas)
        pairs = zip(sample.latents[:-1], sample.sigmas[sample.steps], strict=True)
        predicted = velocities([document(x, sigma, branch) for x, sigma in pairs for branch in branches])
        v = guided(torch.stack(predicted[::2]), torch.stack(predicted[1::2]), denoising.guidance)
        second = sigmas[1].expand(len(steps))
        step = transition(denoising.kind, denoising.noise_level, sigmas[steps], sigmas[steps + 1], second)
        found[f"log-probs of {sample.id}"] = log_prob(step, latents[:-1], v, latents[1:])
    return found


def inputs_of(shape: DenoiserShape) -> list[VelocityInput]:
    return canaries(shape.channels, shape.caption, shape.patch, shape.pooled)


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
    store, rank: int, shape: DenoiserShape, folder: Path, denoising: Denoising
) -> list[tuple[list[LatentSample], dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Refit the engine twice from a Megatron rank, whose weights grow each time. After each refit, return samples, and
    the results of the engine and of the rank."""
    settings = config_of(folder / "transformer").actor
    config = json.loads((folder / "transformer" / "config.json").read_text())
    parallel.initialize(settings.layout, store, rank, seed=0, timeout_s=WAIT_S)
    chunks = build_denoiser(settings, config, torch.float32)
    weights = named_weights(chunks)
    [holder] = megatron_holders(config, settings.layout)
    files = huggingface_holder(config)
    with SafetensorsFolder(folder / "transformer") as transport:
        execute(make_plan([files], [holder]).into(holder.name), weights, transport)

    def velocities(documents: list[Document]) -> list[torch.Tensor]:
        return [v for part in denoiser_step.predict(chunks, [documents]) for v in part]

    engine = DiffusersEngine(folder, "float32", max_batch=3)
    published = {name: torch.empty_like(weight) for name, weight in weights.items()}
    refit = connect(engine, config, holder, published)
    requests = [
        ImageRequest(sample_id=f"0.0.{i}", prompt=Prompt("0", "a red cat", ()), seed=3, denoising=denoising)
        for i in range(4)
    ]
    found = []
    for version in (1, 2):
        for weight in weights.values():
            weight.mul_(GROWTH)
        refit(version, weights)
        inputs = inputs_of(shape)
        of_engine = {f"velocity {number}": torch.tensor(v) for number, v in enumerate(engine.velocities(inputs))}
        samples = asyncio.run(engine.generate(requests))
        of_engine |= {f"log-probs of {sample.id}": torch.tensor(sample.logprobs) for sample in samples}
        found.append((samples, of_engine, results(velocities, inputs, denoising, samples)))
    return found


@pytest.mark.parametrize(("name", "noise"), each_value(tuple(MODELS), (("flow", 0.7), ("dance", 0.3), ("cps", 0.6))))
def test_trainer_and_engine_match_diffusers_after_two_refits(tmp_path, name, noise):
    folder, tiny = write_tiny_image_model(tmp_path, name), MODELS[name]
    denoising = replace(DENOISING, kind=noise[0], noise_level=noise[1])
    [refits] = run_ranks(1, run, tiny.shape, folder, denoising)
    model = tiny.load(folder / "transformer").requires_grad_(False)
    for samples, of_engine, of_trainer in refits:
        for weight in model.state_dict().values():
            weight.mul_(GROWTH)

        def plain(samples=samples) -> dict[str, torch.Tensor]:
            velocities = partial(tiny.velocities, deepcopy(model).to(torch.get_default_dtype()))
            return results(velocities, inputs_of(tiny.shape), denoising, samples)

        reference = expected(plain)
        assert_close(of_engine, *reference, "engine's")
        assert_close(of_trainer, *reference, "trainer's")


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
