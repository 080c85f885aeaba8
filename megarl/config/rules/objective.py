"""Rules for section `algorithm.objective`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.schema import Config


def objective_supports_data_format(config: Config) -> str | None:
    rows, objective = config.data.format, config.algorithm.objective
    if rows in objective.spec.rows:
        return None
    learners = [name for name, spec in OBJECTIVES.items() if rows in spec.rows]
    return (
        f"data.format={rows}: algorithm.objective.name={objective.name} learns from "
        f"{' or '.join(objective.spec.rows)}. Fix: set data.format={objective.spec.rows[0]}, or set "
        f"algorithm.objective.name to {' or '.join(learners)}"
    )


def aggregation_supports_data_format(config: Config) -> str | None:
    objective = config.algorithm.objective
    mode = objective.aggregation
    if config.is_offline and mode == "sequence_mean_over_max_tokens":
        return (
            f"algorithm.objective.aggregation={mode}: the loss is divided by rollout.max_new_tokens, but "
            f"data.format={config.data.format} samples no tokens. Fix: set algorithm.objective.aggregation=token_mean"
        )
    return None


def pairwise_objectives_need_several_samples(config: Config) -> str | None:
    samples = config.batch.samples_per_prompt
    if config.is_offline or not config.algorithm.objective.spec.is_pairwise or samples > 1:
        return None
    return (
        f"batch.samples_per_prompt=1: algorithm.objective.name={config.algorithm.objective.name} compares the best and "
        "the worst sample of each prompt. Fix: set batch.samples_per_prompt to at least 2"
    )


def objective_options_are_valid(config: Config) -> str | None:
    objective = config.algorithm.objective
    lines = [rule(objective.options()) for rule in objective.spec.rules]
    return "\n".join(line for line in lines if line is not None) or None


def adaptive_penalty_requires_several_updates(config: Config) -> str | None:
    objective, batch = config.algorithm.objective, config.batch
    moves = batch.prompts_per_update < batch.prompts_per_step or batch.epochs > 1
    if objective.adapted_penalty_target is None or moves:
        return None
    return (
        f"algorithm.objective.penalty_target={objective.adapted_penalty_target:g}: with one update per step, the "
        "policy equals the old policy and the divergence is 0, so the penalty would shrink in every step. Fix: set "
        f"batch.prompts_per_update below batch.prompts_per_step={batch.prompts_per_step}, or batch.epochs above 1"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    objective_supports_data_format,
    aggregation_supports_data_format,
    pairwise_objectives_need_several_samples,
    objective_options_are_valid,
    adaptive_penalty_requires_several_updates,
)
