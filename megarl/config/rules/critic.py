"""Rules for section `critic`; rules for all trained models are in `trained`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def critic_warmup_ends_before_the_run(config: Config) -> str | None:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if not config.has_critic or warmup < steps:
        return None
    return (
        f"critic.warmup_steps={warmup}: the actor would never be trained, because run.steps={steps}. Fix: set "
        f"critic.warmup_steps below {steps}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (critic_warmup_ends_before_the_run,)
