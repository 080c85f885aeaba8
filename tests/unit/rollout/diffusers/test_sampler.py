"""Sampling against diffusers' own pipeline, closed forms of the SDE, and invariance over batches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.transition import mean, sigma_schedule, transition
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.data.noise import standard_normal
from megarl.rollout.diffusers import sampler
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.diffusers.request import Denoising, ImageRequest
from megarl.rollout.diffusers.sampler import Trajectory, advance
from tests.closeness import LOSS_FLOOR, assert_close, assert_matches, close_to, expected
from tests.tiny_denoiser import MODELS
from tests.tiny_image_model import SHIFT, draw, load_pipeline

ODE = Denoising(height=16, width=24, num_steps=5, shift=SHIFT)
WINDOW = replace(ODE, guidance=2.5, sde_steps=range(1, 3))
TEXTS = ("a red cat", "A blue dog on a very long sofa under a tree")  # of different lengths, even after padding


def requests_for(denoising: Denoising, count: int = 4) -> list[ImageRequest]:
    return [
        ImageRequest(
            sample_id=f"7.0.{i}",
            prompt=Prompt(f"{i % 2}", TEXTS[i % 2], ()),
            seed=5,
            denoising=denoising,
            returns_final=True,
        )
        for i in range(count)
    ]


def generate(engine: DiffusersEngine, requests: Sequence[ImageRequest]) -> list[LatentSample]:
    return asyncio.run(engine.generate(requests))


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_ode_samples_match_diffusers_pipeline(folder, engine, pipeline, name, guidance):
    requests = [
        replace(request, returns_image=True) for request in requests_for(replace(ODE, guidance=guidance), count=2)
    ]
    # For Z-Image, diffusers' guidance scale is megarl's minus 1. The tiny model has fewer positions than usual.
    options = dict(guidance_scale=guidance - 1, max_sequence_length=96)
    options = options if name == "Z-Image" else dict(guidance_scale=guidance)

    def drawn(pipeline: Any, request: ImageRequest, output_type: str) -> Any:
        start = standard_normal(request.seed, request.sample_id, "start", (1, 4, 8, 12)).to(torch.get_default_dtype())
        common = dict(prompt=request.prompt.text, height=16, width=24, num_inference_steps=5, **options)
        [image] = draw(pipeline, **common, latents=start, output_type=output_type)
        return image

    def plain() -> dict[str, torch.Tensor]:
        pipeline = load_pipeline(folder)
        return {request.sample_id: drawn(pipeline, request, "latent") for request in requests}

    samples = generate(engine, requests)
    assert_matches({sample.id: torch.tensor(sample.final) for sample in samples}, plain, "latents")
    for request, sample in zip(requests, samples, strict=True):
        difference = np.asarray(drawn(pipeline, request, "pil")).astype(int) - sample.image
        assert sample.image.shape == (16, 24, 3) and np.abs(difference).max() <= 1
        assert (len(sample.steps), len(sample.latents), len(sample.logprobs)) == (0, 0, 0)


def results(samples: Sequence[LatentSample]) -> dict[str, torch.Tensor]:
    names = ("latents", "final", "logprobs")
    return {f"{name} of {sample.id}": torch.tensor(getattr(sample, name)) for sample in samples for name in names}


def one_by_one(folder: Path, requests: Sequence[ImageRequest]) -> dict[str, torch.Tensor]:
    """Return the results of an engine that computes one sample at a time in the default dtype."""
    engine = DiffusersEngine(folder, f"{torch.get_default_dtype()}".removeprefix("torch."), 1, loads_weights=True)
    engine.hold(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "standard_normal", lambda *args: standard_normal(*args).to(torch.get_default_dtype()))
        return results([sample for request in requests for sample in generate(engine, [request])])


def test_samples_do_not_depend_on_the_batch(folder, engine):
    requests = requests_for(WINDOW, count=5)
    exact, alone = expected(lambda: one_by_one(folder, requests))
    together = generate(engine, requests)
    reversed_order = generate(engine, requests[::-1])[::-1]
    for samples in (together, reversed_order):
        assert [sample.id for sample in samples] == [request.sample_id for request in requests]
        assert_close(results(samples), exact, alone, "engine's")
    assert len({sample.final.tobytes() for sample in together}) == len(together)


def test_requests_join_samples_in_progress(folder, engine):
    """A request that arrives between two steps gives the same sample as one that is alone."""
    first, second = requests_for(WINDOW, count=2)

    async def overlapping() -> list[LatentSample]:
        earlier = asyncio.ensure_future(engine.generate([first]))
        while engine.num_unfinished([first.sample_id]) < 3:
            await asyncio.sleep(0)
        samples = await engine.generate([second])
        await earlier
        return samples

    assert_close(results(asyncio.run(overlapping())), *expected(lambda: one_by_one(folder, [second])), "engine's")


def test_noise_depends_on_seed_sample_and_step_only():
    shape = (4, 50, 50)
    noise = standard_normal(1, "0.0.1", 2, shape)
    assert torch.equal(noise, standard_normal(1, "0.0.1", 2, shape))
    others = [(2, "0.0.1", 2), (1, "0.0.2", 2), (1, "0.0.1", 3), (1, "0.0.1", "start"), (1 + 2**32, "0.0.1", 2)]
    for other in others:
        correlation = (noise * standard_normal(*other, shape)).mean()
        assert abs(correlation) < 5 / math.sqrt(noise.numel()), other
    assert noise.dtype == torch.float32 and abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05


class GaussianFlow:
    """The exact velocity for images whose elements are N(center, spread²), with the interface of diffusers' class."""

    dtype = torch.float32

    def __init__(self, center: float, spread: float):
        self.center, self.spread = center, spread

    def velocity(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Return E[ε − x0 | x], since x_σ is N((1 − σ)·center, (1 − σ)²·spread² + σ²)."""
        deviation = (x - (1 - sigma) * self.center) / ((1 - sigma) ** 2 * self.spread**2 + sigma**2)
        return sigma * deviation - self.center - (1 - sigma) * self.spread**2 * deviation

    def __call__(self, latents, times, captions, return_dict, patch_size):
        pairs = zip(latents, times.tolist(), strict=True)
        return ([-self.velocity(x, 1 - time) for x, time in pairs],)


def denoise(model: GaussianFlow, denoising: Denoising) -> LatentSample:
    [request] = requests_for(denoising, count=1)
    sigmas, caption = sigma_schedule(denoising.num_steps, SHIFT), Conditioning(torch.zeros(1, 1))
    shape = MODELS["Z-Image"].shape
    trajectory = Trajectory.start(request, sigmas, (100, 100), shape, torch.device("cpu"), caption, None)
    while not trajectory.is_done:
        advance(model, [trajectory], shape, max_batch=1, version=0)
    return trajectory.sample(None)


@pytest.mark.parametrize(("kind", "noise_level"), [("flow", 0.7), ("dance", 0.3)])
def test_sde_keeps_the_distribution_of_images(kind, noise_level):
    model, steps = GaussianFlow(center=0.5, spread=1.4), 200
    denoising = replace(ODE, num_steps=steps, kind=kind, noise_level=noise_level, sde_steps=range(steps - 1))
    final = denoise(model, denoising).final
    assert final.mean() == pytest.approx(0.5, abs=0.03)
    assert final.std() == pytest.approx(1.4, abs=0.03)


@pytest.mark.parametrize(("kind", "noise_level"), [("flow", 0.7), ("dance", 0.3), ("cps", 0.6)])
def test_log_probs_are_those_of_the_stored_latents(kind, noise_level):
    model = GaussianFlow(center=0.5, spread=1.4)
    denoising = replace(ODE, kind=kind, noise_level=noise_level, sde_steps=range(4))
    sample = denoise(model, denoising)
    assert sample.latents.dtype == np.float32 and sample.latents.shape == (5, 4, 100, 100)
    assert sample.steps.tolist() == [0, 1, 2, 3]
    latents = torch.tensor(sample.latents)
    for i, log_prob in enumerate(sample.logprobs):
        sigma, sigma_next, second = (torch.tensor([sample.sigmas[k]]) for k in (i, i + 1, 1))
        step = transition(kind, noise_level, sigma, sigma_next, second)

        def plain(i=i, sigma=sigma, step=step) -> float:
            x, x_next = latents[i : i + 2].to(torch.get_default_dtype())
            mu = mean(step, x[None], model.velocity(x, sigma.item())[None])[0]
            return torch.distributions.Normal(mu, step.std.to(mu.dtype)).log_prob(x_next).mean().item()

        assert log_prob == close_to(*expected(plain), LOSS_FLOOR)
        # The expected log-density of a Gaussian is its negative entropy.
        assert log_prob == pytest.approx(-0.5 * math.log(2 * math.pi * math.e * step.std.item() ** 2), abs=0.02)


def test_noised_samples_follow_the_ode(engine):
    """The trainer adds the noise, so that a sample has no latents but the final ones, and no log-probs."""
    requests = [replace(request, noised_steps=(0, 3)) for request in requests_for(ODE, count=2)]
    for sample, plain in zip(generate(engine, requests), generate(engine, requests_for(ODE, count=2)), strict=True):
        assert np.array_equal(sample.final, plain.final)
        assert sample.steps.tolist() == [0, 3] and plain.steps.tolist() == []
        assert sample.is_noised and (len(sample.latents), len(sample.logprobs)) == (0, 0)


def test_noised_steps_exclude_sde_steps():
    [window], [ode] = requests_for(WINDOW, count=1), requests_for(ODE, count=1)
    for request, change in ((window, {}), (ode, {"returns_final": False})):
        with pytest.raises(AssertionError, match=r"^7\.0\.0: noised steps"):
            replace(request, noised_steps=(0, 3), **change)


def test_window_steps_use_the_sde_and_others_the_ode(engine):
    [sample] = generate(engine, requests_for(WINDOW, count=1))
    [full] = generate(engine, requests_for(replace(WINDOW, sde_steps=range(4)), count=1))
    [ode] = generate(engine, requests_for(replace(WINDOW, sde_steps=range(0)), count=1))
    assert sample.steps.tolist() == [1, 2] and sample.latents.shape == (3, 4, 8, 12)
    assert full.steps.tolist() == [0, 1, 2, 3] and full.latents.shape == (5, 4, 8, 12)
    assert np.isfinite(sample.logprobs).all()
    finals = {item.final.tobytes() for item in (sample, full, ode)}
    assert len(finals) == 3
    # Before the window, the trajectory follows the ODE from the same initial noise.
    start = standard_normal(5, "7.0.0", "start", (4, 8, 12))
    assert torch.equal(torch.tensor(full.latents[0]), start)
    assert not torch.equal(torch.tensor(sample.latents[0]), start)
