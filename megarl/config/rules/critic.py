"""The rule of section `critic`; those that hold for every trained model are in `trained`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def warmup_of_the_critic_ends(config: Config) -> str | None:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if not config.has_critic or warmup < steps:
        return None
    return (
        f"critic.warmup_steps={warmup}: in these steps only the critic is trained, and the run has run.steps={steps}; "
        f"set critic.warmup_steps below {steps}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (warmup_of_the_critic_ends,)
