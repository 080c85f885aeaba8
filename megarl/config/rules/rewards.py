"""Rules for section `rewards`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def samples_have_rewards(config: Config) -> str | None:
    rewards = config.rewards
    if config.is_offline or rewards.functions or rewards.judge is not None or config.has_reward_model:
        return None
    if config.has_environment:
        return None
    return (
        "rewards.functions=[]: samples would have no reward. Fix: add a function such as exact_match, or set "
        "reward_model.path or rewards.judge"
    )


def turn_rewards_require_user_functions(config: Config) -> str | None:
    per_turn = [entry.function for entry in config.rewards.functions if entry.per_turn]
    functions = [name for name in per_turn if ":" not in name]
    if not functions:
        return None
    return (
        f"rewards.functions: {functions[0]} with per_turn=true: the function returns one reward for the whole "
        "response. Fix: set per_turn=false, or use path/to/file.py:function, a function that returns one reward per "
        "turn"
    )


def reward_sources_require_source_column(config: Config) -> str | None:
    entries = [entry for entry in config.rewards.functions if entry.sources is not None]
    if not entries or config.is_offline or config.data.source_column is not None:
        return None
    return (
        f"rewards.functions: {entries[0].label} with sources={entries[0].sources}: the source of a row is unknown, "
        "because data.source_column=null. Fix: set data.source_column"
    )


def labels_are_not_reserved(config: Config) -> str | None:
    labels = [entry.label for entry in config.rewards.functions if entry.label in RESERVED]
    if not labels:
        return None
    return (
        f"rewards.functions: name={labels[0]}: this name is reserved for a metric of megarl. Fix: choose another name"
    )


def judge_requires_several_samples(config: Config) -> str | None:
    samples, judge = config.batch.samples_per_prompt, config.rewards.judge
    if judge is None or config.is_offline or samples > 1:
        return None
    return (
        f"rewards.judge={judge}: the judge compares the samples of a prompt, but batch.samples_per_prompt=1. Fix: set "
        "batch.samples_per_prompt to at least 2"
    )


def overlong_buffer_fits_a_response(config: Config) -> str | None:
    buffer, longest = config.rewards.overlong_buffer, config.rollout.max_new_tokens
    if buffer is None or buffer <= longest:
        return None
    return (
        f"rewards.overlong_buffer={buffer}: it exceeds rollout.max_new_tokens={longest}. Fix: set "
        f"rewards.overlong_buffer to at most {longest}"
    )


RESERVED = ("judge", "reward_model", "mean", "std", "failed_frac", "zero_std_groups", "greedy_mean")
"""Names reserved for other reward components and for summary metrics of the reward."""

RULES: tuple[Callable[[Config], str | None], ...] = (
    samples_have_rewards,
    turn_rewards_require_user_functions,
    reward_sources_require_source_column,
    labels_are_not_reserved,
    judge_requires_several_samples,
    overlong_buffer_fits_a_response,
)
