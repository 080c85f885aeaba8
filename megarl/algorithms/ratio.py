"""Ratios of probabilities, from differences of log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_LOG_RATIO = 20.0
"""exp of more would drown every other token of an update. Above 88 it is infinite in float32, and one infinity makes
NaN of all gradients, by 0 · ∞, even where a clip has cut its own off."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """At most LARGEST_LOG_RATIO: what is above has no gradient, what is below is the same bit by bit."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, finite and with a finite gradient."""
    return bounded(log_ratio).exp()
