"""GRPO: rewards minus the group mean, divided by the group's standard deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.algorithms.baselines import Member, mean, scale_of, standard_deviation
from megarl.algorithms.specs import Deviation, GroupEstimator, Options, mean_of_tokens
from megarl.core.ranges import NonNegativeFloat
from megarl.core.score import Baseline, TokenTotals


def grpo(group: Sequence[Member], std: str, std_epsilon: float) -> list[Baseline]:
    """Return the baseline b = mean(r) and scale c = std(r) + std_epsilon: GRPO (https://arxiv.org/abs/2402.03300,
    section 4.1.2). std="sample" divides the squared deviations by n − 1, "population" by n. "none" sets c = 1, as in
    Dr.GRPO (https://arxiv.org/abs/2503.20783)."""
    rewards = [member.reward for member in group]
    scale = 1.0 if std == "none" else scale_of(standard_deviation(rewards, std), std_epsilon)
    return [Baseline(mean(rewards), scale)] * len(group)


def step_scale(groups: Sequence[Sequence[Member]], std: str, std_epsilon: float) -> float:
    """Return the scale c = std(R) + std_epsilon, where R contains the rewards of all groups in the step: Flow-GRPO
    (https://arxiv.org/abs/2505.05470) with a global standard deviation. Groups with equal rewards have advantage 0, and
    small spreads within a group are not amplified."""
    return scale_of(standard_deviation([member.reward for group in groups for member in group], std), std_epsilon)


def step_has_a_deviation(options: Options, _: int) -> str | None:
    key = "algorithm.advantage.std_over=step"
    if options["std_over"] == "step" and options["std"] == "none":
        return f"{key}: has no effect with algorithm.advantage.std=none. Fix: set algorithm.advantage.std_over=group"
    if options["std_over"] == "step" and options["credit"] != "whole":
        return (
            f"{key}: with algorithm.advantage.credit={options['credit']}, token rewards are compared within their "
            "group. Fix: set algorithm.advantage.std_over=group"
        )
    return None


def process_supervision(group: Sequence[TokenTotals], std: str, std_epsilon: float) -> list[tuple[float, float]]:
    """Return the (mean, standard deviation) of all token rewards in the group, repeated for each sample: GRPO with
    process supervision (https://arxiv.org/abs/2402.03300, section 4.1.3)."""
    centers = mean_of_tokens(group)
    if std == "none":
        return centers
    count, (average, _) = sum(totals.count for totals in group), centers[0]
    squares = math.fsum(totals.squares for totals in group) - count * average**2
    divisor = count - 1 if std == "sample" else count
    deviation = math.sqrt(max(squares, 0.0) / divisor) if divisor > 0 else 0.0
    return [(average, scale_of(deviation, std_epsilon))] * len(group)


SPEC = GroupEstimator(
    name="grpo",
    formula="(r_i − mean(r)) / (std(r) + std_epsilon)",
    paper="GRPO, arXiv 2402.03300",
    compare=grpo,
    compare_tokens=process_supervision,
    step_scale=step_scale,
    parameters={"std": (Deviation, "sample"), "std_epsilon": (NonNegativeFloat, 1e-6)},
    rules=(step_has_a_deviation,),
)
