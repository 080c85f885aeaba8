"""A microbatch of denoising steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.core.latents import Conditioning
from megarl.core.row_batch import RowBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch(RowBatch):
    """N denoising steps from x, at noise level σ, to x', at σ'. All images have the same size. For objectives that add
    noise, x' is the image (σ' = 0), x is x' with new noise, and rollout_logprobs are 0.

    latents        float32 [N, channels, height, width], x
    next_latents   float32 [N, channels, height, width], x'
    sigma          float64 [N], σ
    sigma_next     float64 [N], σ'
    second_sigma   float64 [N], the second noise level of the sample's schedule
    captions       the caption of each row, as tensors
    unconditional  the empty caption; None without guidance
    old_v          float32 [N, channels, height, width], velocity of the policy at the start of the step; None: no pass
                   computed it
    reference_v    float32 [N, channels, height, width], velocity of the reference policy; None: not needed
    step_weight    float32 [N], factor of the objective's loss, from `transition.step_weights`; None: 1

    Velocities include guidance. The fields of RowBatch have one row per denoising step.
    """

    latents: torch.Tensor
    next_latents: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    second_sigma: torch.Tensor
    captions: tuple[Conditioning[torch.Tensor], ...]
    unconditional: Conditioning[torch.Tensor] | None = None
    old_v: torch.Tensor | None = None
    reference_v: torch.Tensor | None = None
    step_weight: torch.Tensor | None = None

    row_fields: ClassVar[tuple[str, ...]] = (
        *RowBatch.row_fields,
        *("latents", "next_latents", "sigma", "sigma_next", "second_sigma", "old_v", "reference_v", "step_weight"),
    )
