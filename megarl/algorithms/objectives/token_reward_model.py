"""Token-level reward model: a score for every token in a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.labels import binary_cross_entropy
from megarl.algorithms.specs import LabelObjective

if TYPE_CHECKING:
    import torch


def token_reward_model(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), where s is a token's score and y the label of the step it belongs
    to.

    The loss of a process reward model (Let's Verify Step by Step, https://arxiv.org/abs/2305.20050), applied to every
    token. Scores and labels are float32 [N].
    """
    return binary_cross_entropy(score, label)


SPEC = LabelObjective(
    name="token_reward_model",
    formula="−y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of a token, y the label of its step",
    paper="the loss of process reward models, arXiv 2305.20050, at every token",
    loss=token_reward_model,
    labeled="all",
)
