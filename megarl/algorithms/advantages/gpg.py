"""Rewards against the mean of their group, larger where other groups have no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member, mean
from megarl.algorithms.specs import GroupEstimator
from megarl.core.types import NO_TOTALS, Baseline


def gpg(group: Sequence[Member]) -> list[Baseline]:
    """b = mean(r): GPG (https://arxiv.org/abs/2504.02546, section 3.3), before `amplification`."""
    return [Baseline(mean([member.reward for member in group]))] * len(group)


def amplification(groups: Sequence[Sequence[Member]]) -> float:
    """Return α = samples / samples in groups of unequal rewards: GPG's correction for groups without a gradient
    (https://arxiv.org/abs/2504.02546, section 3.3). It is 1 where all rewards of every group are equal. The rewards
    must be without the KL, which never leaves two of them equal."""
    unequal = sum(len(group) for group in groups if _differ(group))
    return sum(map(len, groups)) / unequal if unequal else 1.0


def _differ(group: Sequence[Member]) -> bool:
    """Return whether rewards of samples differ, or those of single tokens: n·Σx² = (Σx)², to rounding, where all are
    equal."""
    totals = sum((member.token_reward_totals for member in group), NO_TOTALS)
    tokens_differ = totals.count * totals.squares > totals.total**2 * (1 + 1e-12)
    return len({member.reward for member in group}) > 1 or tokens_differ


SPEC = GroupEstimator(
    name="gpg",
    formula="(r_i − mean(r)) · samples / samples in groups of unequal rewards",
    paper="GPG, arXiv 2504.02546",
    compare=gpg,
    amplify=amplification,
)
