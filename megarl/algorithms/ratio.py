"""Ratios of probabilities, from differences of log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_LOG_RATIO = 20.0
"""The bound of log-ratios: exp of more would drown every other token of an update. Above 88 it is infinite in float32,
and one infinity makes NaN of all gradients, by 0 · ∞, even where a clip has cut off its gradient."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to at most LARGEST_LOG_RATIO: those above have no gradient, those below are unchanged bit by
    bit."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the bounded log-ratio, which is finite and has a finite gradient."""
    return bounded(log_ratio).exp()
