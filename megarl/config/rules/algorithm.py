"""Rules for section `algorithm`; `megarl.models.rules` rejects TRPO for mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.document import show
from megarl.config.schema import Config


def group_estimators_need_several_samples(config: Config) -> Iterator[str]:
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    compares = config.algorithm.objective.spec.is_policy_objective and advantage.spec.compares_samples
    if compares and samples < 2 and advantage.option("group_of_one") != "reward":
        yield (
            f"batch.samples_per_prompt={samples}: algorithm.advantage.estimator={advantage.estimator} compares the "
            "samples of a prompt and needs at least 2. Fix: set batch.samples_per_prompt=8"
        )


def estimator_options_are_valid(config: Config) -> Iterator[str]:
    advantage = config.algorithm.advantage
    lines = [rule(advantage.options(), config.batch.samples_per_prompt) for rule in advantage.spec.rules]
    yield from (line for line in lines if line is not None)


def objective_supports_data_format(config: Config) -> Iterator[str]:
    rows, objective = config.data.format, config.algorithm.objective
    if rows not in objective.spec.rows:
        learners = [name for name, spec in OBJECTIVES.items() if rows in spec.rows]
        yield (
            f"data.format={rows}: algorithm.objective.name={objective.name} learns from "
            f"{' or '.join(objective.spec.rows)}. Fix: set data.format={objective.spec.rows[0]}, or set "
            f"algorithm.objective.name to {' or '.join(learners)}"
        )


def aggregation_supports_data_format(config: Config) -> Iterator[str]:
    mode = config.algorithm.objective.aggregation
    if config.is_offline and mode == "sequence_mean_over_max_tokens":
        yield (
            f"algorithm.objective.aggregation={mode}: the loss is divided by rollout.max_new_tokens, but "
            f"data.format={config.data.format} samples no tokens. Fix: set algorithm.objective.aggregation=token_mean"
        )


def pairwise_objectives_need_several_samples(config: Config) -> Iterator[str]:
    samples = config.batch.samples_per_prompt
    if not config.is_offline and config.algorithm.objective.spec.is_pairwise and samples <= 1:
        yield (
            f"batch.samples_per_prompt=1: algorithm.objective.name={config.algorithm.objective.name} compares the best "
            "and the worst sample of each prompt. Fix: set batch.samples_per_prompt to at least 2"
        )


def objective_options_are_valid(config: Config) -> Iterator[str]:
    objective = config.algorithm.objective
    lines = [rule(objective.options()) for rule in objective.spec.rules]
    yield from (line for line in lines if line is not None)


def adaptive_penalty_requires_several_updates(config: Config) -> Iterator[str]:
    objective, batch = config.algorithm.objective, config.batch
    moves = batch.prompts_per_update < batch.prompts_per_step or batch.epochs > 1
    if objective.adapted_penalty_target is not None and not moves:
        yield (
            f"algorithm.objective.penalty_target={objective.adapted_penalty_target:g}: with one update per step, the "
            "policy equals the old policy and the divergence is 0, so the penalty would shrink in every step. Fix: set "
            f"batch.prompts_per_update below batch.prompts_per_step={batch.prompts_per_step}, or batch.epochs above 1"
        )


def mask_bounds_are_ordered(config: Config) -> Iterator[str]:
    low, high = config.algorithm.correction.mask_low, config.algorithm.correction.mask_high
    if low >= high:
        yield (
            f"algorithm.correction.mask_low={low:g}: it must be below algorithm.correction.mask_high={high:g}, or no "
            f"token is kept. Fix: set algorithm.correction.mask_low below {high:g}"
        )


def weight_bounds_are_ordered(config: Config) -> Iterator[str]:
    floor, limit = config.algorithm.correction.weight_floor, config.algorithm.correction.weight_limit
    if floor is not None and limit is not None and floor >= limit:
        yield (
            f"algorithm.correction.weight_floor={floor:g}: it must be below "
            f"algorithm.correction.weight_limit={limit:g}. Fix: set algorithm.correction.weight_floor below {limit:g}"
        )


def adaptive_coefficient_changes_slowly(config: Config) -> Iterator[str]:
    kl, batch = config.algorithm.kl, config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    if kl.adaptive_target is not None and samples > kl.adaptive_horizon:
        yield (
            f"algorithm.kl.adaptive_horizon={kl.adaptive_horizon}: a step has {batch.prompts_per_step} x "
            f"{batch.samples_per_prompt} = {samples} samples, so one step could change the coefficient by more than "
            f"20%. Fix: set algorithm.kl.adaptive_horizon to at least {samples}"
        )


def trust_region_requirements_are_met(config: Config) -> Iterator[str]:
    limit = config.algorithm.trust_region.kl_limit
    if limit is None:
        return
    per_step = config.batch.prompts_per_step
    needed = {
        "algorithm.objective.name": ("unclipped", "TRPO maximizes the unclipped surrogate"),
        "batch.prompts_per_update": (per_step, "TRPO makes a single update per step, starting at the old policy"),
        "batch.epochs": (1, "TRPO makes a single update per step"),
        "model.dtype": ("float32", "TRPO's finite differences are too small for other dtypes"),
        "actor.lora.rank": (None, "TRPO's vectors have the shapes of the full weights"),
        "actor.optimizer.name": ("adamw", "TRPO's step replaces the optimizer's"),
        "critic.shared_backbone": (False, "TRPO's divergence does not include a value head"),
        "algorithm.correction.old": ("trainer", "TRPO's divergence from the old policy must start at 0"),
    }
    for key, (wanted, reason) in needed.items():
        if (value := attrgetter(key)(config)) != wanted:
            yield (
                f"{key}={show(value)}: with algorithm.trust_region.kl_limit={limit:g}, {reason}. Fix: set "
                f"{key}={show(wanted)}, or algorithm.trust_region.kl_limit=null"
            )


RULES = (
    group_estimators_need_several_samples,
    estimator_options_are_valid,
    objective_supports_data_format,
    aggregation_supports_data_format,
    pairwise_objectives_need_several_samples,
    objective_options_are_valid,
    adaptive_penalty_requires_several_updates,
    mask_bounds_are_ordered,
    weight_bounds_are_ordered,
    adaptive_coefficient_changes_slowly,
    trust_region_requirements_are_met,
)
