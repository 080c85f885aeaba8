"""REINFORCE with a moving-average baseline."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member
from megarl.algorithms.specs import SampleEstimator
from megarl.core.score import Baseline


def reinforce(group: Sequence[Member]) -> list[Baseline]:
    """Return b, the moving average of the mean rewards of earlier steps: REINFORCE with a baseline (Williams 1992). A
    decay of 1 gives their plain mean."""
    return [Baseline(member.earlier) for member in group]


SPEC = SampleEstimator(
    name="reinforce",
    formula="r_i − b, b an exponential moving average of the mean rewards of earlier steps",
    paper="Williams 1992, REINFORCE with a baseline",
    comparison="moving_average",
    compare=reinforce,
)
