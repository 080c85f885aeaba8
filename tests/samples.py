"""Samples as a rank receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.core.sample import Sample, SampleRef
from megarl.core.score import NO_BASELINE, Baseline

if TYPE_CHECKING:
    import torch


def training_ref(
    sample: Sample,
    reward: float,
    baseline: Baseline = NO_BASELINE,
    weight: float = 0.0,
    scores: Mapping[str, torch.Tensor] | None = None,
    imitation_weight: float = 0.0,
) -> SampleRef:
    """Return the sample with the inputs of the loss. See SampleRef."""
    values = {"scalar_reward": reward, "weight": weight, "imitation_weight": imitation_weight}
    return replace(SampleRef.of(sample, sample), baseline=baseline, scores=scores or {}, **values)
