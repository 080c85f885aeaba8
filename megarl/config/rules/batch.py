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


def rows_come_again_with_the_data(config: Config) -> str | None:
    epochs = config.batch.epochs
    if epochs == 1 or not config.is_offline:
        return None
    return (
        f"batch.epochs={epochs}: with data.format={config.data.format} nothing is sampled for a step, and rows come again "
        "when all have been; set batch.epochs=1, and run.steps for as many epochs of the data"
    )


def limit_of_the_epochs_has_an_old_policy(config: Config) -> str | None:
    limit, objective = config.batch.epochs_kl_limit, config.algorithm.objective
    if limit is None or config.is_offline or objective.spec.is_policy_objective:
        return None
    return (
        f"batch.epochs_kl_limit={limit:g}: it limits the divergence from the old policy, and "
        f"algorithm.objective.name={objective.name} has none; set batch.epochs_kl_limit=null"
    )


def oversampling_has_rollouts(config: Config) -> str | None:
    if config.batch.oversampling is None or not config.is_offline:
        return None
    return (
        f"batch.oversampling={config.batch.oversampling:g}: with data.format={config.data.format} nothing is sampled; set "
        "batch.oversampling=null"
    )


def what_is_begun_can_be_taken(config: Config) -> str | None:
    factor, staleness = config.batch.oversampling, config.rollout.max_staleness
    if factor is None or config.is_offline or config.drops_rollouts or factor <= 1 + staleness:
        return None
    most = 1 + staleness
    return (
        f"batch.oversampling={factor:g}: the {f'{most} steps' if staleness else 'one step'} that may train on a sample "
        f"with rollout.max_staleness={staleness} {'have' if staleness else 'has'} no room for more than {most} times "
        f"the prompts of one; set rollout.on_stale=drop, which ends the rest, or batch.oversampling={most} at most"
    )


def staleness_has_prompts_ahead(config: Config) -> str | None:
    staleness = config.rollout.max_staleness
    if not staleness or config.prompts_ahead or config.is_offline:
        return None
    return (
        f"batch.oversampling={config.batch.oversampling:g}: with as many prompts as a step takes none is begun ahead, "
        f"and rollout.max_staleness={staleness} changes nothing; set batch.oversampling=null, for {1 + staleness}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    prompts_that_tell_nothing_can_be_found,
    rows_come_again_with_the_data,
    limit_of_the_epochs_has_an_old_policy,
    oversampling_has_rollouts,
    what_is_begun_can_be_taken,
    staleness_has_prompts_ahead,
)
