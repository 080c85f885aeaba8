"""The rules of section `agreement`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def masked_tokens_are_compared(config: Config) -> str | None:
    if config.logprob_check.action != "mask" or config.algorithm.correction.old != "rollout":
        return None
    return (
        "logprob_check.action=mask: with algorithm.correction.old=rollout the trainer makes no log-probs to compare the "
        "engine's with; set old=trainer, or action=warn or stop"
    )


def masked_tokens_have_losses_of_their_own(config: Config) -> str | None:
    objective = config.algorithm.objective
    if config.logprob_check.action != "mask" or objective.spec.is_policy_objective or config.is_offline:
        return None
    return (
        f"logprob_check.action=mask: algorithm.objective.name={objective.name} compares whole samples in pairs, of which "
        "no part can be left out; set action=warn or stop"
    )


def something_can_stop_the_run(config: Config) -> str | None:
    if config.logprob_check.action != "stop" or config.agreement_limit is not None:
        return None
    return (
        f"logprob_check.action=stop: with rollout.max_staleness={config.rollout.max_staleness} samples of earlier weights "
        "differ by more than rounding, and logprob_check.limit=null is none; set a limit, or action=warn"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    masked_tokens_are_compared,
    masked_tokens_have_losses_of_their_own,
    something_can_stop_the_run,
)
