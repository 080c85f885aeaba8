"""Collates denoising steps into the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms import transition
from megarl.core.latents import LatentSample
from megarl.core.sample import SampleRef
from megarl.core.step_batch import StepBatch
from megarl.data.collate import scalars
from megarl.data.noise import standard_normal

StepNumber = tuple[str, int]
"""(sample id, index among the sample's trained steps)."""

Velocities = Mapping[StepNumber, torch.Tensor]
"""Velocities under guidance, float32 [channels, height, width]."""


def step_number(item: SampleRef) -> StepNumber:
    assert item.step is not None, f"sample {item.id} was not dispatched by denoising step"
    return item.id, item.step


def collate_steps(items: Sequence[SampleRef], step_weights: Mapping[int, float]) -> StepBatch:
    """Return a microbatch of these steps in host memory, as the engine sampled them.

    Args:
        items: denoising steps with their samples loaded; may be empty.
        step_weights: loss weight of each denoising step; see transition.step_weights.
    """
    samples, indices, numbers = _steps(items)
    return _batch(
        items,
        latents=_stack([sample.latents[index] for sample, index in zip(samples, indices, strict=True)]),
        next_latents=_stack([sample.latents[index + 1] for sample, index in zip(samples, indices, strict=True)]),
        sigma_next=_levels([sample.sigmas[number + 1] for sample, number in zip(samples, numbers, strict=True)]),
        rollout_logprobs=torch.tensor([sample.logprobs[index] for sample, index in zip(samples, indices, strict=True)]),
        step_weight=torch.tensor([step_weights[number] for number in numbers]),
    )


def collate_noised_steps(items: Sequence[SampleRef], seed: int) -> StepBatch:
    """Return a microbatch of these steps for an objective that adds noise: x is the sampled image x' = x0 with new
    noise, and σ' = 0. The noise depends only on the seed, the sample and the step. `items` may be empty."""
    samples, _, numbers = _steps(items)
    images = _stack([_final(sample) for sample in samples])
    noise = [
        standard_normal(seed, sample.id, number, _final(sample).shape)
        for sample, number in zip(samples, numbers, strict=True)
    ]
    sigma = _levels([sample.sigmas[number] for sample, number in zip(samples, numbers, strict=True)])
    return _batch(
        items,
        latents=transition.interpolate(images, torch.stack(noise), sigma) if noise else images,
        next_latents=images,
        sigma_next=torch.zeros_like(sigma),
        rollout_logprobs=torch.zeros(len(items)),
        step_weight=None,
    )


def _final(sample: LatentSample) -> NDArray[np.float32]:
    assert sample.final is not None, f"sample {sample.id} was requested without its final latents"
    return sample.final


def _steps(items: Sequence[SampleRef]) -> tuple[list[LatentSample], list[int], list[int]]:
    """Return each item's sample, the index of its step among the sample's trained steps, and the number of the step."""
    samples: list[LatentSample] = [item.sample for item in items]
    indices = [step_number(item)[1] for item in items]
    return samples, indices, [int(sample.steps[index]) for sample, index in zip(samples, indices, strict=True)]


def _batch(items: Sequence[SampleRef], **fields: torch.Tensor | None) -> StepBatch:
    """Return the microbatch with these fields and the fields that do not depend on how x and x' were computed."""
    samples, _, numbers = _steps(items)
    rows, mask = torch.arange(len(items)), torch.ones(len(items), dtype=torch.bool)
    empty = samples[0].empty_embedding if samples else None
    given: dict[str, Any] = fields | scalars(items, rows, mask)
    batch = StepBatch(
        sigma=_levels([sample.sigmas[number] for sample, number in zip(samples, numbers, strict=True)]),
        second_sigma=_levels([sample.sigmas[1] for sample in samples]),
        captions=tuple(sample.embedding.map(torch.tensor) for sample in samples),
        unconditional=None if empty is None else empty.map(torch.tensor),
        row_sample=rows,
        mask=mask,
        stale=torch.tensor([item.is_stale for item in items]) if any(item.is_stale for item in items) else None,
        **given,
    )
    batch.validate()
    return batch


def _stack(latents: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(latents) if latents else np.empty((0, 0, 0, 0), np.float32))


def _levels(sigmas: Sequence[float]) -> torch.Tensor:
    return torch.tensor(sigmas, dtype=torch.float64)
