"""Bradley–Terry reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.pairs import bradley_terry
from megarl.algorithms.specs import LabelSmoothing, PairObjective

if TYPE_CHECKING:
    import torch


def reward_model(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), where m is the better response's score minus the worse one's.

    InstructGPT (https://arxiv.org/abs/2203.02155, eq. 1), where the label_smoothing ε is 0. The margin m is float32
    [P].
    """
    return bradley_terry(margin, label_smoothing)


SPEC = PairObjective(
    name="reward_model",
    formula="−(1 − ε)·log σ(m) − ε·log σ(−m), m = s_better − s_worse, ε = label_smoothing",
    paper="Bradley–Terry reward model; InstructGPT, arXiv 2203.02155, eq. 1",
    loss=reward_model,
    parameters={"label_smoothing": (LabelSmoothing, 0.0)},
    classifier="sequence",
)
