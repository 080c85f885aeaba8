"""The objective of a reward model that scores every token of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.labels import binary_cross_entropy
from megarl.algorithms.specs import LabelObjective

if TYPE_CHECKING:
    import torch


def token_reward_model(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of a token and y the label of what it is part of.

    The loss of a process reward model (Let's Verify Step by Step, https://arxiv.org/abs/2305.20050), at every token.
    score, label: float32 [N].
    """
    return binary_cross_entropy(score, label)


SPEC = LabelObjective(
    name="token_reward_model",
    formula="−y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of a token, y the label of its step",
    paper="the loss of process reward models, arXiv 2305.20050, at every token",
    loss=token_reward_model,
    labelled="all",
)
