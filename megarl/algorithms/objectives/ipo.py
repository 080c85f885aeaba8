"""IPO: preference learning from log-ratios to the reference, with a finite optimal margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.rewards import require_pairs
from megarl.algorithms.specs import PairObjective
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def ipo(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """Return ℓ = (m/β − 1 / (2·β))², where m = β·h and h is the log-ratio of the better response minus that of the
    worse one.

    IPO (https://arxiv.org/abs/2310.12036, eq. 17, where β is called τ). The margin m is float32 [P].
    """
    require_pairs(margin)
    return (margin / beta - 1 / (2 * beta)).square()


SPEC = PairObjective(
    name="ipo",
    formula="(m/β − 1 / (2·β))², m = β·(log π/π_ref of the better − of the worse)",
    paper="IPO, arXiv 2310.12036",
    loss=ipo,
    parameters={"beta": (PositiveFloat, 0.1)},
    rows=("preferences", "prompts"),
    reads_reference=True,
)
