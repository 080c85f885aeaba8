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


RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    prompts_that_tell_nothing_can_be_found,
)
