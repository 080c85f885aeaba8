"""Token-level reward model: a score for every token in a response.

The loss is that of a process reward model (Let's Verify Step by Step, https://arxiv.org/abs/2305.20050), applied to
every token: the cross-entropy between the label y of the token's step and the token's score s.
"""

from megarl.algorithms.rewards import binary_cross_entropy
from megarl.algorithms.specs import LabelObjective

SPEC = LabelObjective(
    name="token_reward_model",
    formula="−y·log σ(s) − (1 − y)·log(1 − σ(s)), s the score of a token, y the label of its step",
    paper="the loss of process reward models, arXiv 2305.20050, at every token",
    loss=binary_cross_entropy,
    labeled="all",
)
