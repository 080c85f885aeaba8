"""REINFORCE without a baseline: the reward itself."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member
from megarl.algorithms.specs import SampleEstimator
from megarl.core.score import NO_BASELINE, Baseline


def policy_gradient(group: Sequence[Member]) -> list[Baseline]:
    """Return b_i = 0 for each sample: REINFORCE (Williams 1992)."""
    return [NO_BASELINE] * len(group)


SPEC = SampleEstimator(
    name="policy_gradient", formula="r_i", paper="Williams 1992, REINFORCE", comparison="none", compare=policy_gradient
)
