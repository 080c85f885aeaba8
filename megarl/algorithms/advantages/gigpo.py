"""GiGPO: group-relative advantages of rollouts, and of turns that start in the same environment state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.algorithms.advantages.grpo import grpo
from megarl.algorithms.baselines import Member, Turn, mean, scale_of, standard_deviation
from megarl.algorithms.specs import Deviation, GroupEstimator
from megarl.core.ranges import NonNegativeFloat, Share
from megarl.core.score import Baseline


def gigpo(
    group: Sequence[Member], std: str, std_epsilon: float, turn_gamma: float, turn_weight: float
) -> list[Baseline]:
    """Return the baselines of the rollouts, b = mean(R) and c = std(R) + std_epsilon as in GRPO: the episode-level
    advantages of GiGPO (https://arxiv.org/abs/2505.10978). std="none" sets c = 1; the paper reports both. Only
    `turn_advantages` uses turn_gamma and turn_weight."""
    return grpo(group, std, std_epsilon)


def turn_advantages(
    group: Sequence[Sequence[Turn]], std: str, std_epsilon: float, turn_gamma: float, turn_weight: float
) -> list[list[float]]:
    """Return ω·(G_k − mean(G)) / (std(G) + std_epsilon) for each turn k of each rollout: GiGPO's step-level advantages
    times their weight (https://arxiv.org/abs/2505.10978).

    G_k = Σ_{l≥k} γ^(l−k)·r_l is the discounted return of the rollout from turn k on. Its mean and deviation are over
    all turns in the group that start in the same state, so a turn whose state occurs once has advantage 0.

    Args:
        group: the turns of each rollout, in order.
        turn_gamma: γ, the discount from one turn to the next.
        turn_weight: ω.
    """
    returns = [_returns(turns, turn_gamma) for turns in group]
    by_state: dict[int, list[float]] = defaultdict(list)
    for turns, of_rollout in zip(group, returns, strict=True):
        for turn, discounted in zip(turns, of_rollout, strict=True):
            by_state[turn.state].append(discounted)
    centers = {state: mean(found) for state, found in by_state.items()}
    scales = {
        state: 1.0 if std == "none" else scale_of(standard_deviation(found, std), std_epsilon)
        for state, found in by_state.items()
    }
    return [
        [
            turn_weight * (discounted - centers[turn.state]) / scales[turn.state]
            for turn, discounted in zip(turns, of_rollout, strict=True)
        ]
        for turns, of_rollout in zip(group, returns, strict=True)
    ]


def _returns(turns: Sequence[Turn], gamma: float) -> list[float]:
    returns: list[float] = []
    for turn in reversed(turns):
        returns.append(turn.reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


SPEC = GroupEstimator(
    name="gigpo",
    formula="(R_i − mean(R)) / (std(R) + std_epsilon) + turn_weight · the same for returns of turns in equal states",
    paper="GiGPO, arXiv 2505.10978",
    compare=gigpo,
    compare_turns=turn_advantages,
    parameters={
        "std": (Deviation, "sample"),
        "std_epsilon": (NonNegativeFloat, 1e-6),
        "turn_gamma": (Share, 0.95),
        "turn_weight": (NonNegativeFloat, 1.0),
    },
)
