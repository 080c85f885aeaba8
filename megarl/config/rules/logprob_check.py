"""Rules for section `logprob_check`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def masking_requires_trainer_logprobs(config: Config) -> str | None:
    if config.logprob_check.action != "mask" or config.algorithm.correction.old != "rollout":
        return None
    return (
        "logprob_check.action=mask: with algorithm.correction.old=rollout, the trainer computes no log-probs to "
        "compare with the engine's. Fix: set algorithm.correction.old=trainer, or logprob_check.action=warn"
    )


def masking_requires_token_losses(config: Config) -> str | None:
    objective = config.algorithm.objective
    if config.logprob_check.action != "mask" or objective.spec.is_policy_objective or config.is_offline:
        return None
    return (
        f"logprob_check.action=mask: algorithm.objective.name={objective.name} computes one loss per pair, so single "
        "tokens cannot be masked. Fix: set logprob_check.action=warn"
    )


def stopping_requires_limit(config: Config) -> str | None:
    if config.logprob_check.action != "stop" or config.agreement_limit is not None:
        return None
    return (
        "logprob_check.action=stop: the run would never stop, because with "
        f"rollout.max_staleness={config.rollout.max_staleness} logprob_check.limit=null means no limit. Fix: set "
        "logprob_check.limit, or logprob_check.action=warn"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    masking_requires_trainer_logprobs,
    masking_requires_token_losses,
    stopping_requires_limit,
)
