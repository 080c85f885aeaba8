"""SLiC: preference learning from log-probs with a hinge loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PairObjective
from megarl.core.ranges import NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    import torch


def slic(margin: torch.Tensor, better: torch.Tensor, hinge_margin: float, regularisation: float) -> torch.Tensor:
    """Return ℓ = max(0, δ − m) − λ·log π(y₊), where m = log π(y₊) − log π(y₋), y₊ is the better response and y₋ the
    worse one.

    SLiC-HF (https://arxiv.org/abs/2305.10425, eq. 4), with δ = hinge_margin and λ = regularisation. The paper trains
    with δ = 1, the default, and without length normalization. It does not report λ; the default of ½ is megarl's. The
    paper's second term uses the supervised fine-tuning target or the best of several sampled responses, with similar
    results. Preference pairs have no such target, so this function uses the better response; for sampled responses,
    that is the best one. The margin m and the reward of the better response, log π(y₊), are float32 [P].
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
