"""The rules of section `batch`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.divisors import divisors, does_not_divide
from megarl.config.schema import Config


def prompts_per_update_divides_prompts_per_step(config: Config) -> str | None:
    per_step, per_update = config.batch.prompts_per_step, config.batch.prompts_per_update
    return does_not_divide("batch.prompts_per_update", per_update, "prompts per step", per_step, divisors(per_step))


def prompts_that_tell_nothing_can_be_found(config: Config) -> str | None:
    rounds, samples = config.batch.sampling_rounds, config.batch.samples_per_prompt
    if rounds == 1 or samples >= 2:
        return None
    return (
        f"batch.sampling_rounds={rounds}: prompts whose samples all have one reward are replaced, and with "
        "batch.samples_per_prompt=1 that is each of them; set batch.sampling_rounds=1 or batch.samples_per_prompt=8"
    )


def what_is_begun_can_be_taken(config: Config) -> str | None:
    factor, staleness = config.batch.oversampling, config.rollout.max_staleness
    if factor is None or config.is_offline or config.drops_rollouts or factor <= 1 + staleness:
        return None
    most = 1 + staleness
    return (
        f"batch.oversampling={factor:g}: the {f'{most} steps' if staleness else 'one step'} that may train on a sample "
        f"with rollout.max_staleness={staleness} {'have' if staleness else 'has'} no room for more than {most} times "
        f"the prompts of one; set rollout.on_stale=drop, which ends the rest, or batch.oversampling={most} at most"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    prompts_that_tell_nothing_can_be_found,
    what_is_begun_can_be_taken,
)
