"""SLiC: preferences from log-probs, with a margin beyond which nothing more is learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PairObjective
from megarl.core.ranges import NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    import torch


def slic(margin: torch.Tensor, better: torch.Tensor, hinge_margin: float, regularisation: float) -> torch.Tensor:
    """ℓ = max(0, δ − m) − λ·log π(y₊), m = log π(y₊) − log π(y₋), y₊ the better response of a pair and y₋ the worse.

    SLiC-HF (https://arxiv.org/abs/2305.10425, eq. 1), δ the hinge_margin and λ the regularisation. The paper takes the
    target of supervised fine-tuning in its second term; pairs have none, and their better response stands for it.
    margin, better: float32 [P], better being log π(y₊).
    """
    require_one_shape(margin=margin, better=better)
    return (hinge_margin - margin).relu() - regularisation * better


SPEC = PairObjective(
    name="slic",
    formula="max(0, δ − m) − λ·log π of the better, m = log π of the better − of the worse, δ = hinge_margin, "
    "λ = regularisation",
    paper="SLiC-HF, arXiv 2305.10425",
    loss=slic,
    inputs=("better",),
    parameters={"hinge_margin": (PositiveFloat, 1.0), "regularisation": (NonNegativeFloat, 0.5)},
    rows=("preferences", "prompts"),
)
