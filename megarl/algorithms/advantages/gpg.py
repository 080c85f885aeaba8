"""GPG: rewards minus the group mean, scaled up to compensate for groups without a gradient
(https://arxiv.org/abs/2504.02546, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.baselines import Member, group_mean
from megarl.algorithms.specs import GroupEstimator
from megarl.core.score import NO_TOTALS


def amplification(groups: Sequence[Sequence[Member]]) -> float:
    """Return α = number of samples / number of samples in groups with unequal rewards, or 1 if every group has equal
    rewards. Pass rewards without the KL term: with it, no two rewards would be equal."""
    unequal = sum(len(group) for group in groups if _differ(group))
    return sum(map(len, groups)) / unequal if unequal else 1.0


def _differ(group: Sequence[Member]) -> bool:
    """Return whether the group has unequal sample rewards or unequal token rewards. All n token rewards are equal if
    and only if n·Σx² = (Σx)², up to rounding."""
    totals = sum((member.token_reward_totals for member in group), NO_TOTALS)
    tokens_differ = totals.count * totals.squares > totals.total**2 * (1 + 1e-12)
    return len({member.reward for member in group}) > 1 or tokens_differ


SPEC = GroupEstimator(
    name="gpg",
    formula="(r_i − mean(r)) · samples / samples in groups of unequal rewards",
    paper="GPG, arXiv 2504.02546",
    compare=group_mean,
    amplify=amplification,
)
