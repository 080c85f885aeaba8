"""OPO: rewards minus the length-weighted group mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.algorithms.baselines import Member, group_mean
from megarl.algorithms.specs import GroupEstimator
from megarl.core.score import Baseline


def opo(group: Sequence[Member]) -> list[Baseline]:
    """Return b = Σ l_j·r_j / Σ l_j: the optimal baseline if a sample's squared gradient norm is proportional to its
    length: OPO (https://arxiv.org/abs/2505.23585, eq. 7). Falls back to the plain mean if no sample has a trained
    token."""
    num_tokens = sum(member.num_tokens for member in group)
    if not num_tokens:
        return group_mean(group)
    return [Baseline(math.fsum(member.num_tokens * member.reward for member in group) / num_tokens)] * len(group)


SPEC = GroupEstimator(
    name="opo", formula="r_i − Σ l_j·r_j / Σ l_j, l the lengths", paper="OPO, arXiv 2505.23585", compare=opo
)
