"""Rules for section `algorithm.kl`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def adaptive_coefficient_changes_slowly(config: Config) -> str | None:
    kl, batch = config.algorithm.kl, config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    if kl.adaptive_target is None or samples <= kl.adaptive_horizon:
        return None
    return (
        f"algorithm.kl.adaptive_horizon={kl.adaptive_horizon}: a step has {batch.prompts_per_step} x "
        f"{batch.samples_per_prompt} = {samples} samples, so one step could change the coefficient by more than 20%. "
        f"Fix: set algorithm.kl.adaptive_horizon to at least {samples}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (adaptive_coefficient_changes_slowly,)
