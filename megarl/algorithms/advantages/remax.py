"""ReMax: rewards minus the reward of a greedy response to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member
from megarl.algorithms.specs import SampleEstimator
from megarl.core.score import Baseline


def remax(group: Sequence[Member]) -> list[Baseline]:
    """Return b, the reward of the greedy response: ReMax (https://arxiv.org/abs/2310.10505, section 4)."""
    return [Baseline(member.greedy) for member in group]


SPEC = SampleEstimator(
    name="remax",
    formula="r_i − r of the greedy response",
    paper="ReMax, arXiv 2310.10505",
    comparison="greedy",
    compare=remax,
)
