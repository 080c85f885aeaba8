"""Labels of tokens or samples, between 0 and 1, and the scores that tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def binary_cross_entropy(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), float32 [N].

    score   float32 [N], s: the log-odds of the label
    label   float32 [N], y: 1 for what is right, 0 for what is wrong, or the probability that it is right
    """
    from torch.nn.functional import binary_cross_entropy_with_logits

    require_one_shape(score=score, label=label)
    return binary_cross_entropy_with_logits(score, label, reduction="none")
