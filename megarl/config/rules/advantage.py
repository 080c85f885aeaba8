"""The rules of section `algorithm.advantage`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config


def estimator_reads_its_options(config: Config) -> str | None:
    advantage = config.algorithm.advantage
    options = {name: value for name, value in advantage.model_dump().items() if name != "estimator"}
    unused_keys = [name for name, value in options.items() if value is not None and name not in advantage.spec.options]
    if not unused_keys:
        return None
    assignments = ", ".join(f"algorithm.advantage.{name}={show(options[name])}" for name in unused_keys)
    return (
        f"{assignments}: not read by algorithm.advantage.estimator={advantage.estimator}, which has the options "
        f"{', '.join(advantage.spec.options)}; set {'it' if len(unused_keys) == 1 else 'them'} to null"
    )


def compared_samples_are_of_one_prompt(config: Config) -> str | None:
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    if not config.algorithm.objective.spec.is_policy_objective or not advantage.spec.compares_samples or samples >= 2:
        return None
    if advantage.option("group_of_one") == "reward":
        return None
    return (
        f"batch.samples_per_prompt={samples}: {advantage.estimator} compares the samples of a prompt with each other "
        "and needs at least 2; set batch.samples_per_prompt=8"
    )


def std_of_pass_at_k_has_a_reader(config: Config) -> str | None:
    advantage = config.algorithm.advantage
    if advantage.estimator != "pass_at_k" or advantage.std != "sample":
        return None
    return (
        "algorithm.advantage.std=sample: pass_at_k divides by the deviation over all sets of k samples, which is that "
        "of the population; set algorithm.advantage.std=null"
    )


def k_samples_are_there(config: Config) -> str | None:
    """k is at most the number of samples; with the baseline over all sets it is less, as n samples make one set of n,
    whose best is the same for each of them."""
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    if advantage.estimator != "pass_at_k" or samples < 2:  # a rule of its own says that there must be two
        return None
    k, all_sets = advantage.option("k"), advantage.option("pass_at_k_baseline") == "all"
    if k > samples:
        return (
            f"algorithm.advantage.k={k}: the best of k is among batch.samples_per_prompt={samples} samples; set k to "
            f"at most {samples - all_sets}"
        )
    if k == samples and all_sets:
        return (
            f"algorithm.advantage.k={k}: of batch.samples_per_prompt={samples} samples there is one set of {k}, whose "
            f"best no sample changes, so that every advantage is 0; set k to at most {k - 1}, or "
            "pass_at_k_baseline=without"
        )
    return None


RULES: tuple[Callable[[Config], str | None], ...] = (
    estimator_reads_its_options,
    compared_samples_are_of_one_prompt,
    std_of_pass_at_k_has_a_reader,
    k_samples_are_there,
)
