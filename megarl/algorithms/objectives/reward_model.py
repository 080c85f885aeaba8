"""Bradley–Terry reward model.

InstructGPT (https://arxiv.org/abs/2203.02155, eq. 1): ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), where m is the better
response's score minus the worse one's. There, the label_smoothing ε is 0.
"""

from megarl.algorithms.rewards import bradley_terry
from megarl.algorithms.specs import LabelSmoothing, PairObjective

SPEC = PairObjective(
    name="reward_model",
    formula="−(1 − ε)·log σ(m) − ε·log σ(−m), m = s_better − s_worse, ε = label_smoothing",
    paper="Bradley–Terry reward model; InstructGPT, arXiv 2203.02155, eq. 1",
    loss=bradley_terry,
    parameters={"label_smoothing": (LabelSmoothing, 0.0)},
    classifier="sequence",
)
