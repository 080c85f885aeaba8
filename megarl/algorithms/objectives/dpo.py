"""DPO: preference learning from log-ratios to the reference.

DPO (https://arxiv.org/abs/2305.18290, eq. 7): ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), where m = β·h and h is the log-ratio
of the better response minus that of the worse one. A label_smoothing ε > 0 gives conservative DPO (Mitchell, 2023).
"""

from megarl.algorithms.rewards import bradley_terry
from megarl.algorithms.specs import LabelSmoothing, PairObjective

SPEC = PairObjective(
    name="dpo",
    formula="−(1 − ε)·log σ(m) − ε·log σ(−m), m = β·(log π/π_ref of the better − of the worse), ε = label_smoothing",
    paper="DPO, arXiv 2305.18290; from sampled responses: online DPO, arXiv 2402.04792",
    loss=bradley_terry,
    parameters={"label_smoothing": (LabelSmoothing, 0.0)},
    rows=("preferences", "prompts"),
    reads_reference=True,
)
