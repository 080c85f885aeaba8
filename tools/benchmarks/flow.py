"""Compare an update and a rollout of an image model with plain loops around diffusers' classes.

.venv/bin/python tools/benchmarks/flow.py --out tools/benchmarks/results/flow.json
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from benchmark import in_new_process, load_config, run_benchmark
from diffusers import ZImageTransformer2DModel
from training_case import peak_rss_bytes, timed
from training_step import RETURN_FREED_MEMORY

from megarl.algorithms import transition
from megarl.algorithms.baselines import MovingAverage
from megarl.core.latents import LatentSample
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.diffusers.request import Denoising, ImageRequest
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch
from tests.tiny_image_model import PIXELS_PER_LATENT, load_pipeline, write_tiny_image_model

TRANSFORMER = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 8,
    "axes_dims": [8, 12, 12],
    "axes_lens": [1024, 64, 64],
}
LATENTS, PATCH = 32, 2
"""Height and width in latents, of an image and of one of its tokens."""

CAPTIONS: dict[str, Callable[[random.Random], float]] = {
    "equal captions": lambda _: 20,
    "mixed captions": lambda source: 4 * 2 ** source.uniform(0, 7),
}
"""Case -> function that draws a caption's length in characters, each of which is a token."""

NOISE_LEVEL, GUIDANCE, CLIP, LEARNING_RATE = 0.7, 4.0, 1e-3, 1e-5
REWARDS = (1.0, 0.0)
IMAGES, TOKENS, BATCHES, TIMES = 8, 4096, (4, 8), 3
"""Images per step, each with two trained denoising steps; tokens per microbatch of megarl; images per batch of the
plain loops; and number of processes that measure each side."""
DENOISING = Denoising(
    height=LATENTS * PIXELS_PER_LATENT,
    width=LATENTS * PIXELS_PER_LATENT,
    num_steps=4,
    shift=3.0,
    guidance=GUIDANCE,
    noise_level=NOISE_LEVEL,
    sde_steps=range(1, 3),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One side of a comparison.

    Attributes:
        batch: number of images, or of denoising steps, in a forward pass of the plain loops; each has two branches.
    """

    folder: Path
    captions: list[str]
    batch: int


Work = Callable[[], object]
"""Function whose time is measured."""


def measure(_: object, work: Path) -> dict[str, Any]:
    folder, cases = write_tiny_image_model(work, **TRANSFORMER), {}
    for title, length in CAPTIONS.items():
        source = random.Random(0)
        cases[title] = compare(Case(folder, ["a" * round(length(source)) for _ in range(IMAGES)], 0))
    about = {"transformer": TRANSFORMER, "images": IMAGES, "environment_for_memory": RETURN_FREED_MEMORY}
    return about | {"cases": cases}


def compare(case: Case) -> dict[str, Any]:
    """Measure the sides in separate processes, alternating between them because the machine's speed drifts. Measure the
    memory of each side in another process, because returning freed memory is slow. The fastest batch of the plain loops
    counts."""
    samples = in_new_process(sampled, case)
    found: dict[str, Any] = {"caption_tokens": [len(sample.embedding.tokens) for sample in samples]}
    # An update needs the weights of the transformer, their gradients, and two Adam states.
    state_bytes = {"rollout": weight_bytes(case.folder), "update": 4 * weight_bytes(case.folder / "transformer")}
    for what, own, plain in (("rollout", rollout, plain_rollout), ("update", update, plain_update)):
        sides = [(own, case), *((plain, replace(case, batch=size)) for size in BATCHES)]
        runs: list[dict[str, Any]] = [{"seconds": [], "batch": part.batch} for _, part in sides]
        for _ in range(TIMES):
            for side, (prepare, part) in zip(runs, sides, strict=True):
                side["seconds"].append(in_new_process(measured, prepare, part, samples)[0])
        megarl, *others = runs
        others.sort(key=lambda side: median(side["seconds"]))
        os.environ |= RETURN_FREED_MEMORY
        for side, prepare in ((megarl, own), (others[0], plain)):
            _, peak = in_new_process(measured, prepare, replace(case, batch=side["batch"]), samples)
            side["bytes_above_state"] = peak - state_bytes[what]
        for name in RETURN_FREED_MEMORY:
            del os.environ[name]
        found[what] = {
            "ratio_of_speeds": median(others[0]["seconds"]) / median(megarl["seconds"]),
            "ratio_of_bytes_above_state": megarl["bytes_above_state"] / others[0]["bytes_above_state"],
            "megarl": megarl,
            "diffusers": others[0],
            "diffusers_slower_batches": others[1:],
        }
    return found


Prepare = Callable[["Case", Sequence[LatentSample]], Work]


def measured(prepare: Prepare, case: Case, samples: Sequence[LatentSample]) -> tuple[float, int]:
    """Return the seconds of the faster of two calls after a warm-up, and the peak resident memory minus the memory
    before the model is built, in bytes."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    before = psutil.Process().memory_info().rss
    work = prepare(case, samples)
    work()  # fills caches and memory pools
    return min(timed(work, 2)), peak_rss_bytes() - before


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def sampled(case: Case) -> list[LatentSample]:
    return asyncio.run(engine_of(case).generate(requests_of(case)))


def engine_of(case: Case) -> DiffusersEngine:
    engine = DiffusersEngine(case.folder, "float32", max_batch=len(case.captions), loads_weights=True)
    engine.hold(0)
    return engine


def requests_of(case: Case) -> list[ImageRequest]:
    texts = enumerate(case.captions)
    options: dict[str, Any] = {"seed": 0, "denoising": DENOISING, "returns_image": True}
    return [ImageRequest(sample_id=f"{i}", prompt=Prompt(f"{i}", text, ()), **options) for i, text in texts]


def rollout(case: Case, _: Sequence[LatentSample]) -> Work:
    engine, requests, loop = engine_of(case), requests_of(case), asyncio.new_event_loop()
    return lambda: loop.run_until_complete(engine.generate(requests))  # asyncio.run would call repr on the samples


def plain_rollout(case: Case, _: Sequence[LatentSample]) -> Work:
    pipeline = load_pipeline(case.folder)
    model, vae = pipeline.transformer, pipeline.vae
    captions, _ = pipeline.encode_prompt([*case.captions, ""], do_classifier_free_guidance=False)
    *captions, empty = captions
    sigmas = torch.tensor(transition.sigma_schedule(DENOISING.num_steps, 3.0))

    @torch.no_grad()
    def work() -> None:
        for start in range(0, len(captions), case.batch):
            texts = captions[start : start + case.batch]
            x = torch.randn(len(texts), model.config.in_channels, LATENTS, LATENTS)
            for index in range(DENOISING.num_steps):
                sigma = sigmas[index].expand(len(texts))
                step = transitions(sigmas, [index] * len(texts), NOISE_LEVEL * (index in DENOISING.sde_steps))
                x = transition.sample(step, x, velocity(model, x, sigma, texts, empty), torch.randn_like(x))
            vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor)

    return work


def update(case: Case, samples: Sequence[LatentSample]) -> Work:
    settings = {
        "model.dtype": "float32",
        "actor.optimizer.lr": LEARNING_RATE,
        "actor.tokens_per_microbatch": TOKENS,
        "rollout.engine": "diffusers",
        "rollout.denoising.guidance": GUIDANCE,
        "rollout.denoising.num_steps": DENOISING.num_steps,
        "algorithm.objective.clip_low": CLIP,
        "algorithm.objective.clip_high": CLIP,
    }
    config = load_config(case.folder, settings)
    file = dist.FileStore(str(case.folder / f"store-{os.getpid()}"), 1)
    worker = DenoiserWorker(config, case.folder / "transformer", 0, file, threads=torch.get_num_threads())
    scored = [[replace(SampleRef.of(s, s), outcome=reward) for s, reward in zip(samples, cycle(REWARDS), strict=False)]]
    refs = attach_baselines(config, scored, {}, {}, MovingAverage(0.0, 1.0))
    [batch] = dispatch(config, refs, worker.packing)

    def work() -> None:
        worker.update(LocalBatch(batch.samples, batch.microbatches))
        worker.end_step()

    return work


def plain_update(case: Case, samples: Sequence[LatentSample]) -> Work:
    model = ZImageTransformer2DModel.from_pretrained(case.folder / "transformer")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    rows = [(sample, k, (-1.0) ** i) for i, sample in enumerate(samples) for k in range(len(sample.steps))]
    sigmas = torch.tensor(samples[0].sigmas)
    empty = torch.tensor(samples[0].empty_embedding.tokens)

    def work() -> None:
        for start in range(0, len(rows), case.batch):
            members = rows[start : start + case.batch]
            x, x_next = (torch.tensor(np.stack([s.latents[k + i] for s, k, _ in members])) for i in (0, 1))
            texts = [torch.tensor(sample.embedding.tokens) for sample, *_ in members]
            steps = [int(sample.steps[k]) for sample, k, _ in members]
            v = velocity(model, x, sigmas[steps].float(), texts, empty)
            log_prob = transition.log_prob(transitions(sigmas, steps, NOISE_LEVEL), x, v, x_next)
            ratio = (log_prob - log_prob.detach()).exp()
            advantages = torch.tensor([advantage for *_, advantage in members])
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            (-surrogate.sum() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return work


def transitions(sigmas: torch.Tensor, steps: Sequence[int], noise_level: float) -> transition.Transition:
    start, end = sigmas[list(steps)], sigmas[[step + 1 for step in steps]]
    return transition.transition("flow", noise_level, start, end, sigmas[1].expand(len(start)))


def velocity(
    model: torch.nn.Module, x: torch.Tensor, sigma: torch.Tensor, texts: Sequence[torch.Tensor], empty: torch.Tensor
) -> torch.Tensor:
    """Return the velocity under guidance, from one call for both branches. Captions are padded to the longest. The
    model takes 1 − σ and returns −v."""
    images, captions = [*x[:, :, None]] * 2, [*texts, *[empty] * len(texts)]
    output, *_ = model(images, 1 - sigma.float().repeat(2), captions, return_dict=False, patch_size=PATCH)
    with_caption, without = -torch.stack(output)[:, :, 0].unflatten(0, (2, -1))
    return transition.guided(with_caption, without, GUIDANCE)


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
