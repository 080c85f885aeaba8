"""DPO: preference learning from log-ratios to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.pairs import bradley_terry
from megarl.algorithms.specs import LabelSmoothing, PairObjective

if TYPE_CHECKING:
    import torch


def dpo(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), where m = β·h and h is the log-ratio of the better response minus
    that of the worse one.

    DPO (https://arxiv.org/abs/2305.18290, eq. 7). A label_smoothing ε > 0 gives conservative DPO (Mitchell, 2023). The
    margin m is float32 [P].
    """
    return bradley_terry(margin, label_smoothing)


SPEC = PairObjective(
    name="dpo",
    formula="−(1 − ε)·log σ(m) − ε·log σ(−m), m = β·(log π/π_ref of the better − of the worse), ε = label_smoothing",
    paper="DPO, arXiv 2305.18290; from sampled responses: online DPO, arXiv 2402.04792",
    loss=dpo,
    parameters={"label_smoothing": (LabelSmoothing, 0.0)},
    rows=("preferences", "prompts"),
    reads_reference=True,
)
