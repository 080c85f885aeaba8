"""Binary classification loss for token or sample labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def binary_cross_entropy(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), float32 [N]. The score s, float32 [N], is the log-odds that the
    label is 1. The label y, float32 [N], is 1 for correct, 0 for incorrect, or the probability of being correct."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    require_one_shape(score=score, label=label)
    return binary_cross_entropy_with_logits(score, label, reduction="none")
