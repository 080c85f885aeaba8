"""The rules between the objective, its data, and the keys that it leaves unread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.algorithm_schema import Advantage
from megarl.config.document import show
from megarl.config.schema import Config

ADVANTAGE_KEYS: Mapping[str, Any] = {
    "algorithm.advantage.estimator": "grpo",
    **{f"algorithm.advantage.{name}": None for name in Advantage.model_fields if name != "estimator"},
    "algorithm.objective.entropy_coefficient": 0.0,
    "algorithm.objective.imitation_coefficient": 0.0,
    "algorithm.objective.skip_truncated": False,
    "algorithm.correction.old": "trainer",
    "algorithm.correction.weight": None,
    "algorithm.correction.mask": None,
    "algorithm.kl.coefficient": 0.0,
    "implicit_reward.coefficient": 0.0,
}
"""Keys that belong to objectives of advantages only -> the value with which they ask for nothing."""

ROLLOUT_KEYS: Mapping[str, Any] = {
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": None,
    "actor.offload": [],
    "reward_model.path": None,
    "rewards.judge": None,
    "rewards.overlong_buffer": None,
}
"""Keys that belong to runs that sample only -> the value with which they ask for nothing."""


def objective_reads_its_options(config: Config) -> str | None:
    objective = config.algorithm.objective
    reads = objective.spec.options
    every = dict.fromkeys(option for spec in OBJECTIVES.values() for option in spec.options)
    unread = [name for name in every if name not in reads and getattr(objective, name) is not None]
    if not unread:
        return None
    option, value = unread[0], getattr(objective, unread[0])
    readers = [name for name, spec in OBJECTIVES.items() if option in spec.options]
    return (
        f"algorithm.objective.{option}={show(value)}: algorithm.objective.name={objective.name} reads "
        f"{' and '.join(reads) or 'no option'}, and {option} belongs to {', '.join(readers)}; set "
        f"algorithm.objective.{option}=null"
    )


def objective_learns_from_the_rows(config: Config) -> str | None:
    rows, objective = config.data.format, config.algorithm.objective
    if rows in objective.spec.rows:
        return None
    learners = [name for name, spec in OBJECTIVES.items() if rows in spec.rows]
    return (
        f"data.format={rows}: algorithm.objective.name={objective.name} learns from {' or '.join(objective.spec.rows)}; "
        f"set data.format to that, or take one of {', '.join(learners)}"
    )


def keys_of_advantages_have_a_reader(config: Config) -> str | None:
    objective = config.algorithm.objective
    if objective.spec.is_policy_objective:
        return None
    return _unread(config, ADVANTAGE_KEYS, f"algorithm.objective.name={objective.name} has no advantages")


def keys_of_rollouts_have_a_reader(config: Config) -> str | None:
    if not config.is_offline:
        return None
    return _unread(config, ROLLOUT_KEYS, f"with data.format={config.data.format} nothing is sampled")


def aggregation_has_a_reader(config: Config) -> str | None:
    objective = config.algorithm.objective
    mode, default = objective.aggregation, "sequence_mean_of_token_means"
    if objective.spec.is_pairwise and mode != default:
        return (
            f"algorithm.objective.aggregation={mode}: algorithm.objective.name={objective.name} has a loss for each "
            f"pair, whose mean is taken; set aggregation={default}, which is not read"
        )
    if objective.spec.is_pairwise and objective.empty_samples != "include":
        return (
            f"algorithm.objective.empty_samples=exclude: algorithm.objective.name={objective.name} has a loss for "
            "each pair, whatever is trained of it; set empty_samples=include, which is not read"
        )
    if config.is_offline and mode == "sequence_mean_over_max_tokens":
        return (
            f"algorithm.objective.aggregation={mode}: it divides by rollout.max_new_tokens, and with data.format="
            f"{config.data.format} nothing is sampled; set aggregation=token_mean"
        )
    return None


def pairs_are_sampled(config: Config) -> str | None:
    samples = config.batch.samples_per_prompt
    if config.is_offline or not config.algorithm.objective.spec.is_pairwise or samples > 1:
        return None
    return (
        f"batch.samples_per_prompt=1: algorithm.objective.name={config.algorithm.objective.name} compares the best and "
        "the worst sample of each prompt; set batch.samples_per_prompt to at least 2"
    )


def options_keep_the_rules_of_the_objective(config: Config) -> str | None:
    objective = config.algorithm.objective
    lines = [rule(objective.options()) for rule in objective.spec.rules]
    return "\n".join(line for line in lines if line is not None) or None


def clipped_ratio_stays_positive(config: Config) -> str | None:
    """The lower bound 1 − clip_low of the ratio is positive."""
    objective = config.algorithm.objective
    low = objective.clip_low
    if low is None or low < 1 or objective.spec.clips_log_ratio:
        return None
    return (
        f"algorithm.objective.clip_low={low:g}: the ratio's lower bound 1 - {low:g} = {1 - low:g} is not positive; set "
        "clip_low below 1, such as 0.2"
    )


def penalty_follows_a_policy_that_moves(config: Config) -> str | None:
    objective, batch = config.algorithm.objective, config.batch
    moves = batch.prompts_per_update < batch.prompts_per_step or batch.epochs > 1
    if objective.penalty_target is None or moves:
        return None
    return (
        f"algorithm.objective.penalty_target={objective.penalty_target:g}: in a step's only update the policy is the "
        "old one, whose divergence is 0, so that the penalty would be halved again and again; set "
        f"batch.prompts_per_update below batch.prompts_per_step={batch.prompts_per_step}, or batch.epochs above 1"
    )


def _unread(config: Config, keys: Mapping[str, Any], reason: str) -> str | None:
    values = {key: reduce(getattr, key.split("."), config) for key in keys}
    lines = [
        f"{key}={show(value)}: {reason}, so that nothing reads it; set {key}={show(keys[key])}"
        for key, value in values.items()
        if value != keys[key]
    ]
    return "\n".join(lines) or None


RULES: tuple[Callable[[Config], str | None], ...] = (
    objective_reads_its_options,
    objective_learns_from_the_rows,
    keys_of_advantages_have_a_reader,
    keys_of_rollouts_have_a_reader,
    aggregation_has_a_reader,
    pairs_are_sampled,
    options_keep_the_rules_of_the_objective,
    clipped_ratio_stays_positive,
    penalty_follows_a_policy_that_moves,
)
