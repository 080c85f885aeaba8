"""Rules for section `batch`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.divisors import divisibility_error, divisors
from megarl.config.schema import Config


def prompts_per_update_divides_prompts_per_step(config: Config) -> str | None:
    per_step, per_update = config.batch.prompts_per_step, config.batch.prompts_per_update
    return divisibility_error("batch.prompts_per_update", per_update, "prompts per step", per_step, divisors(per_step))


def dynamic_sampling_needs_groups(config: Config) -> str | None:
    rounds, samples = config.batch.sampling_rounds, config.batch.samples_per_prompt
    if rounds == 1 or samples >= 2:
        return None
    return (
        f"batch.sampling_rounds={rounds}: dynamic sampling replaces prompts whose samples all have the same reward. "
        "With batch.samples_per_prompt=1 it would replace every prompt. Fix: set batch.sampling_rounds=1 or "
        "batch.samples_per_prompt=8"
    )


def oversampled_prompts_are_used(config: Config) -> str | None:
    factor, staleness = config.batch.oversampling, config.rollout.max_staleness
    if factor is None or config.is_offline or config.drops_rollouts or factor <= 1 + staleness:
        return None
    most = 1 + staleness
    return (
        f"batch.oversampling={factor:g}: with rollout.max_staleness={staleness} a sample must be used within {most} "
        f"{'steps' if staleness else 'step'}, so at most {most} x batch.prompts_per_step prompts can be in flight. "
        f"Fix: set batch.oversampling to at most {most}, or set rollout.on_stale=drop to drop stale samples"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    dynamic_sampling_needs_groups,
    oversampled_prompts_are_used,
)
