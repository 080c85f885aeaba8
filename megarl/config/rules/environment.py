"""Rules for section `environment`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config
from megarl.config.sources import OWN_TASKS


def generated_tasks_require_environment(config: Config) -> str | None:
    if config.data.source != OWN_TASKS or config.has_environment:
        return None
    return (
        f"data.source={OWN_TASKS}: the environment would generate the tasks, but environment.class=null. Fix: set "
        "environment.class, or set data.source to a file"
    )


def multi_turn_rollouts_have_rollout_rewards(config: Config) -> str | None:
    """Functions that score one prompt and one response cannot score rollouts with several turns or samples."""
    if not config.has_environment:
        return None
    per_turn = [entry.function for entry in config.rewards.functions if entry.per_turn]
    readers = {
        f"reward_model.path={config.reward_model.path}": config.has_reward_model,
        f"rewards.judge={config.rewards.judge}": config.rewards.judge is not None,
        f"rewards.functions: {per_turn[:1]} with per_turn=true": bool(per_turn),
        f"algorithm.objective.name={config.algorithm.objective.name}": config.algorithm.objective.spec.is_pairwise,
    }
    name = config.environment.name
    lines = [
        f"{reader}: it scores a single response, but with environment.class={name} a rollout has several turns. Fix: "
        "remove it, and return rewards from the environment's steps"
        for reader, is_there in readers.items()
        if is_there
    ]
    return "\n".join(lines) or None


def turns_fit_a_response(config: Config) -> str | None:
    turn, longest = config.environment.turn_tokens, config.rollout.max_new_tokens
    if turn is None or turn <= longest:
        return None
    return (
        f"environment.turn_tokens={turn}: it exceeds rollout.max_new_tokens={longest}, the limit for all turns "
        f"together. Fix: set environment.turn_tokens to at most {longest}, or raise rollout.max_new_tokens"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    generated_tasks_require_environment,
    multi_turn_rollouts_have_rollout_rewards,
    turns_fit_a_response,
)
