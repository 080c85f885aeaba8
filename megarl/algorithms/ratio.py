"""Probability ratios from log-prob differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_LOG_RATIO = 20.0
"""Upper bound on log-ratios. A larger ratio would dominate all other tokens in an update. Beyond 88, exp overflows
float32, and a single infinity turns all gradients into NaN (0 · ∞), even where a clip has stopped the gradient."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to at most LARGEST_LOG_RATIO. Clamped values have no gradient; all others are unchanged bit for
    bit."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the bounded log-ratio, which is finite and has a finite gradient."""
    return bounded(log_ratio).exp()
