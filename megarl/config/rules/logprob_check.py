"""Rules for section `logprob_check`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def masked_tokens_are_compared(config: Config) -> str | None:
    if config.logprob_check.action != "mask" or config.algorithm.correction.old != "rollout":
        return None
    return (
        "logprob_check.action=mask: with algorithm.correction.old=rollout the trainer computes no log-probs to "
        "compare with the engine's. Fix: set algorithm.correction.old=trainer, or logprob_check.action=warn"
    )


def masked_tokens_have_losses_of_their_own(config: Config) -> str | None:
    objective = config.algorithm.objective
    if config.logprob_check.action != "mask" or objective.spec.is_policy_objective or config.is_offline:
        return None
    return (
        f"logprob_check.action=mask: algorithm.objective.name={objective.name} has a loss per pair, so single "
        "tokens cannot be masked. Fix: set logprob_check.action=warn"
    )


def something_can_stop_the_run(config: Config) -> str | None:
    if config.logprob_check.action != "stop" or config.agreement_limit is not None:
        return None
    return (
        f"logprob_check.action=stop: with rollout.max_staleness={config.rollout.max_staleness} stale samples differ by "
        "more than rounding, and logprob_check.limit=null sets no limit. Fix: set a limit, or logprob_check.action=warn"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    masked_tokens_are_compared,
    masked_tokens_have_losses_of_their_own,
    something_can_stop_the_run,
)
