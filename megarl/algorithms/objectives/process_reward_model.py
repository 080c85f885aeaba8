"""Process reward model: scores for the steps in a response.

The loss is the cross-entropy between a step's label y and the score s of the step's last token. Let's Verify Step by
Step (https://arxiv.org/abs/2305.20050) uses human labels, 0 or 1. Math-Shepherd (https://arxiv.org/abs/2312.08935, eq.
2) uses estimated labels, hard or soft.
"""

from megarl.algorithms.rewards import binary_cross_entropy
from megarl.algorithms.specs import LabelObjective

SPEC = LabelObjective(
    name="process_reward_model",
    formula="−y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of the token that ends a step, y the step's label",
    paper="Let's Verify Step by Step, arXiv 2305.20050; Math-Shepherd, arXiv 2312.08935, eq. 2",
    loss=binary_cross_entropy,
    labeled="end",
)
