"""Process reward model: scores for the steps in a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.labels import binary_cross_entropy
from megarl.algorithms.specs import LabelObjective

if TYPE_CHECKING:
    import torch


def process_reward_model(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), where s is the score of a step's last token and y the step's
    label.

    Let's Verify Step by Step (https://arxiv.org/abs/2305.20050) uses human labels, 0 or 1. Math-Shepherd
    (https://arxiv.org/abs/2312.08935, eq. 2) uses estimated labels, hard or soft. Scores and labels are float32 [N].
    """
    return binary_cross_entropy(score, label)


SPEC = LabelObjective(
    name="process_reward_model",
    formula="−y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of the token that ends a step, y the step's label",
    paper="Let's Verify Step by Step, arXiv 2305.20050; Math-Shepherd, arXiv 2312.08935, eq. 2",
    loss=process_reward_model,
    labeled="end",
)
