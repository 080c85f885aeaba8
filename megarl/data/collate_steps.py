"""Collates denoising steps into the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megarl.core.latents import LatentSample
from megarl.core.step_batch import StepBatch
from megarl.core.types import SampleRef
from megarl.data.collate import scalars

StepNumber = tuple[str, int]
"""Sample id, and index of a step among the sample's trained steps."""

Velocities = Mapping[StepNumber, torch.Tensor]
"""Velocities under guidance, float32 [channels, height, width]."""


def step_number(item: SampleRef) -> StepNumber:
    assert item.step is not None, f"sample {item.id} was not dispatched by denoising step"
    return item.id, item.step


def collate_steps(items: Sequence[SampleRef], step_weights: Mapping[int, float]) -> StepBatch:
    """Return the microbatch of these steps, which may be empty, in host memory.

    Args:
        items: references to denoising steps, with the samples in place of their references.
        step_weights: factor of the loss by denoising step; see transition.step_weights.
    """
    samples: list[LatentSample] = [item.sample for item in items]
    indices = [step_number(item)[1] for item in items]
    numbers = [int(sample.steps[index]) for sample, index in zip(samples, indices, strict=True)]
    rows, mask = torch.arange(len(items)), torch.ones(len(items), dtype=torch.bool)
    captions = tuple(sample.embedding.map(torch.tensor) for sample in samples)
    empty = samples[0].empty_embedding if samples else None
    batch = StepBatch(
        latents=_stack([sample.latents[index] for sample, index in zip(samples, indices, strict=True)]),
        next_latents=_stack([sample.latents[index + 1] for sample, index in zip(samples, indices, strict=True)]),
        sigma=_levels([sample.sigmas[number] for sample, number in zip(samples, numbers, strict=True)]),
        sigma_next=_levels([sample.sigmas[number + 1] for sample, number in zip(samples, numbers, strict=True)]),
        second_sigma=_levels([sample.sigmas[1] for sample in samples]),
        captions=captions,
        unconditional=None if empty is None else empty.map(torch.tensor),
        row_sample=rows,
        rollout_logprobs=torch.tensor([sample.logprobs[index] for sample, index in zip(samples, indices, strict=True)]),
        mask=mask,
        stale=torch.tensor([item.is_stale for item in items]) if any(item.is_stale for item in items) else None,
        step_weight=torch.tensor([step_weights[number] for number in numbers]),
        **scalars(items, rows, mask),
    )
    batch.validate()
    return batch


def _stack(latents: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(latents) if latents else np.empty((0, 0, 0, 0), np.float32))


def _levels(sigmas: Sequence[float]) -> torch.Tensor:
    return torch.tensor(sigmas, dtype=torch.float64)
