"""Rules for section `critic`; rules for all trained models are in `trained`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def warmup_of_the_critic_ends(config: Config) -> str | None:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if not config.has_critic or warmup < steps:
        return None
    return (
        f"critic.warmup_steps={warmup}: the actor would never be trained in run.steps={steps}. Fix: "
        f"set critic.warmup_steps below {steps}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (warmup_of_the_critic_ends,)
