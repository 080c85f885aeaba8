"""Rules for the sections `environment` and `sandbox`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.data_schema import OWN_TASKS
from megarl.config.schema import Config


def generated_tasks_require_environment(config: Config) -> Iterator[str]:
    if config.data.source == OWN_TASKS and not config.has_environment:
        yield (
            f"data.source={OWN_TASKS}: the environment would generate the tasks, but environment.class=null. Fix: set "
            "environment.class, or set data.source to a file"
        )


def multi_turn_rollouts_have_rollout_rewards(config: Config) -> Iterator[str]:
    """Functions that score one prompt and one response cannot score rollouts with several turns or samples."""
    if not config.has_environment:
        return
    per_turn = [entry.function for entry in config.rewards.functions if entry.per_turn]
    readers = {
        f"reward_model.path={config.reward_model.path}": config.has_reward_model,
        f"rewards.judge={config.rewards.judge}": config.rewards.judge is not None,
        f"rewards.functions: {per_turn[:1]} with per_turn=true": bool(per_turn),
        f"algorithm.objective.name={config.algorithm.objective.name}": config.algorithm.objective.spec.is_pairwise,
    }
    for reader in (reader for reader, is_used in readers.items() if is_used):
        yield (
            f"{reader}: it scores a single response, but with environment.class={config.environment.name} a rollout "
            "has several turns. Fix: remove it, and return rewards from the environment's steps"
        )


def turns_fit_a_response(config: Config) -> Iterator[str]:
    turn, longest = config.environment.turn_tokens, config.rollout.max_new_tokens
    if turn is not None and turn > longest:
        yield (
            f"environment.turn_tokens={turn}: it exceeds rollout.max_new_tokens={longest}, the limit for all turns "
            f"together. Fix: set environment.turn_tokens to at most {longest}, or raise rollout.max_new_tokens"
        )


def apptainer_has_an_image(config: Config) -> Iterator[str]:
    sandbox = config.sandbox
    if sandbox.provider == "apptainer" and sandbox.image is None:
        yield (
            "sandbox.image=null: sandbox.provider=apptainer needs an image that contains python3. Fix: run `apptainer "
            "pull python.sif docker://python:3.11-slim` and set sandbox.image=python.sif"
        )


RULES = (
    generated_tasks_require_environment,
    multi_turn_rollouts_have_rollout_rewards,
    turns_fit_a_response,
    apptainer_has_an_image,
)
