"""REINFORCE++-baseline: rewards minus the group mean, whitened over the update (https://arxiv.org/abs/2501.03262)."""

from megarl.algorithms.baselines import group_mean
from megarl.algorithms.specs import GroupEstimator

SPEC = GroupEstimator(
    name="reinforce_plus_plus_baseline",
    formula="r_i − mean(r), whitened over the update",
    paper="REINFORCE++, arXiv 2501.03262",
    compare=group_mean,
    whitens=True,
)
