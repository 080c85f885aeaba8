"""The rules of section `environment`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config
from megarl.config.sources import OWN_TASKS


def options_are_of_a_class(config: Config) -> str | None:
    options = config.environment.options
    if config.has_environment or not options:
        return None
    return f"environment.options={options}: nothing reads it without environment.class; set that, or remove them"


def own_tasks_have_an_environment(config: Config) -> str | None:
    if config.data.source != OWN_TASKS or config.has_environment:
        return None
    return (
        f"data.source={OWN_TASKS}: these are tasks that an environment makes itself, and environment.class=null; set "
        "environment.class, or give a file"
    )


def environments_answer_what_is_sampled(config: Config) -> str | None:
    if not config.has_environment or not config.is_offline:
        return None
    return (
        f"environment.class={config.environment.name}: with data.format={config.data.format} nothing is sampled that it "
        "could answer; set environment.class=null, or data.format=prompts"
    )


def whole_rollouts_are_rewarded(config: Config) -> str | None:
    """What reads one prompt and one response has no place for a rollout of several turns, or of several samples."""
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
        f"{reader}: it reads a prompt and one response, and with environment.class={name} a rollout has several turns; "
        "let the environment's steps return rewards instead"
        for reader, is_there in readers.items()
        if is_there
    ]
    return "\n".join(lines) or None


def turns_fit_a_response(config: Config) -> str | None:
    turn, longest = config.environment.turn_tokens, config.rollout.max_new_tokens
    if turn is None or turn <= longest:
        return None
    return (
        f"environment.turn_tokens={turn}: all turns of a sample have rollout.max_new_tokens={longest} together; lower "
        "it, or raise rollout.max_new_tokens"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    options_are_of_a_class,
    own_tasks_have_an_environment,
    environments_answer_what_is_sampled,
    whole_rollouts_are_rewarded,
    turns_fit_a_response,
)
