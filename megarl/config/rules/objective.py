"""Rules for section `algorithm.objective`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.schema import Config


def objective_learns_from_the_rows(config: Config) -> str | None:
    rows, objective = config.data.format, config.algorithm.objective
    if rows in objective.spec.rows:
        return None
    learners = [name for name, spec in OBJECTIVES.items() if rows in spec.rows]
    return (
        f"data.format={rows}: algorithm.objective.name={objective.name} learns from "
        f"{' or '.join(objective.spec.rows)}. Fix: set data.format to that, or take one of {', '.join(learners)}"
    )


def aggregation_has_a_reader(config: Config) -> str | None:
    objective = config.algorithm.objective
    mode = objective.aggregation
    if config.is_offline and mode == "sequence_mean_over_max_tokens":
        return (
            f"algorithm.objective.aggregation={mode}: it divides by rollout.max_new_tokens, which data.format="
            f"{config.data.format} does not have. Fix: set aggregation=token_mean"
        )
    return None


def pairs_are_sampled(config: Config) -> str | None:
    samples = config.batch.samples_per_prompt
    if config.is_offline or not config.algorithm.objective.spec.is_pairwise or samples > 1:
        return None
    return (
        f"batch.samples_per_prompt=1: algorithm.objective.name={config.algorithm.objective.name} compares the best and "
        "the worst sample of each prompt. Fix: set batch.samples_per_prompt to at least 2"
    )


def options_keep_the_rules_of_the_objective(config: Config) -> str | None:
    objective = config.algorithm.objective
    lines = [rule(objective.options()) for rule in objective.spec.rules]
    return "\n".join(line for line in lines if line is not None) or None


def penalty_follows_a_policy_that_moves(config: Config) -> str | None:
    objective, batch = config.algorithm.objective, config.batch
    moves = batch.prompts_per_update < batch.prompts_per_step or batch.epochs > 1
    if objective.adapted_penalty_target is None or moves:
        return None
    return (
        f"algorithm.objective.penalty_target={objective.adapted_penalty_target:g}: with one update per step the policy "
        "is the old one and the divergence 0, so the penalty would shrink every step. Fix: set "
        f"batch.prompts_per_update below batch.prompts_per_step={batch.prompts_per_step}, or batch.epochs above 1"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    objective_learns_from_the_rows,
    aggregation_has_a_reader,
    pairs_are_sampled,
    options_keep_the_rules_of_the_objective,
    penalty_follows_a_policy_that_moves,
)
