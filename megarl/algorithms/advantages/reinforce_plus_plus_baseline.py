"""REINFORCE++-baseline: rewards minus the group mean, whitened over the update."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member, mean
from megarl.algorithms.specs import GroupEstimator
from megarl.core.types import Baseline


def reinforce_plus_plus_baseline(group: Sequence[Member]) -> list[Baseline]:
    """Return b = mean(r) for each sample: REINFORCE++ with a group baseline (https://arxiv.org/abs/2501.03262), before
    whitening."""
    return [Baseline(mean([member.reward for member in group]))] * len(group)


SPEC = GroupEstimator(
    name="reinforce_plus_plus_baseline",
    formula="r_i − mean(r), whitened over the update",
    paper="REINFORCE++, arXiv 2501.03262",
    compare=reinforce_plus_plus_baseline,
    whitens=True,
)
