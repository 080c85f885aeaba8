"""Rules for section `algorithm.advantage`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def group_estimators_need_several_samples(config: Config) -> str | None:
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    if not config.algorithm.objective.spec.is_policy_objective or not advantage.spec.compares_samples or samples >= 2:
        return None
    if advantage.option("group_of_one") == "reward":
        return None
    return (
        f"batch.samples_per_prompt={samples}: algorithm.advantage.estimator={advantage.estimator} compares the samples "
        "of a prompt and needs at least 2. Fix: set batch.samples_per_prompt=8"
    )


def estimator_options_are_valid(config: Config) -> str | None:
    advantage = config.algorithm.advantage
    lines = [rule(advantage.options(), config.batch.samples_per_prompt) for rule in advantage.spec.rules]
    return "\n".join(line for line in lines if line is not None) or None


RULES: tuple[Callable[[Config], str | None], ...] = (
    group_estimators_need_several_samples,
    estimator_options_are_valid,
)
