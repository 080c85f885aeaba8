"""The rules of section `algorithm.kl`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def adaptive_coefficient_starts_somewhere(config: Config) -> str | None:
    kl, batch = config.algorithm.kl, config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    if kl.adaptive_target is None:
        return None
    if not kl.coefficient:
        return (
            f"algorithm.kl.adaptive_target={kl.adaptive_target:g}: algorithm.kl.coefficient=0 stays 0 whatever it is "
            "multiplied with; set a coefficient above 0, or adaptive_target=null"
        )
    if samples <= kl.adaptive_horizon:
        return None
    return (
        f"algorithm.kl.adaptive_horizon={kl.adaptive_horizon}: a step has {batch.prompts_per_step} x "
        f"{batch.samples_per_prompt} = {samples} samples and would change the coefficient by more than 20 %; set "
        f"adaptive_horizon to at least {samples}"
    )


def renewal_is_of_a_reference(config: Config) -> str | None:
    kl = config.algorithm.kl
    if kl.renew_steps is not None and not config.has_reference:
        return (
            f"algorithm.kl.renew_steps={kl.renew_steps}: with algorithm.kl.coefficient=0 there is no reference to "
            "renew; set renew_steps=null or a coefficient above 0"
        )
    if kl.renew_steps is None and kl.renew_share != 1:
        return (
            f"algorithm.kl.renew_share={kl.renew_share:g}: with algorithm.kl.renew_steps=null the reference is never "
            "renewed; set renew_steps=1 for a moving average, or renew_share=1"
        )
    return None


RULES: tuple[Callable[[Config], str | None], ...] = (
    adaptive_coefficient_starts_somewhere,
    renewal_is_of_a_reference,
)
