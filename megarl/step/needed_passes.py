"""The forward-only passes that a run needs. A pass that provably changes nothing is skipped, with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.algorithms.specs import BASELINE_KINDS
from megarl.config.algorithm_schema import KL
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config

PassName = Literal[
    "old log-probs",
    "reference log-probs",
    "teacher log-probs",
    "teacher hidden states",
    "teacher most probable tokens",
    "implicit rewards",
    "critic values",
]


@dataclass(frozen=True, slots=True)
class Pass:
    name: PassName
    needed: bool
    reason: str


def passes(config: Config) -> tuple[Pass, ...]:
    coefficient = config.implicit_reward.coefficient
    return (
        _old_log_probs(config),
        _reference_log_probs(config),
        *_teacher_scores(config),
        Pass("implicit rewards", config.has_implicit_reward, f"implicit_reward.coefficient={coefficient:g}"),
        _critic_values(config),
    )


def _reference_log_probs(config: Config) -> Pass:
    coefficient, objective = config.algorithm.kl.coefficient, config.algorithm.objective
    if not config.has_reference:
        reason = "algorithm.kl.coefficient=0" if objective.spec.is_policy_objective else _chosen(config)
        return Pass("reference log-probs", False, f"{reason}: no term uses them")
    user = f"algorithm.kl.coefficient={coefficient:g}" if coefficient > 0 else _chosen(config)
    return Pass("reference log-probs", True, f"{user}; {_reference(config.algorithm.kl)}")


def _teacher_scores(config: Config) -> list[Pass]:
    """Return the teachers' pass, or an empty list without teachers."""
    distillation = config.algorithm.distillation
    coefficient = f"{distillation.coefficient:g}"
    if distillation.anneal_steps is not None:
        coefficient += f", annealed to {distillation.final_coefficient:g} over {distillation.anneal_steps} steps"
    names = ", ".join(map(_described, config.teachers.models))
    reason = f"algorithm.distillation.coefficient={coefficient}; teachers: {names}"
    name: PassName = "teacher hidden states" if distillation.is_exact else "teacher most probable tokens"
    name = "teacher log-probs" if distillation.is_sampled else name
    return [Pass(name, config.has_teachers, reason)] if names else []


def _described(teacher: Teacher) -> str:
    if teacher.path is not None:
        return teacher.name
    return f"{teacher.name} [the {teacher.weights} with privileged prompts]"


def _critic_values(config: Config) -> Pass:
    advantage = config.algorithm.advantage
    if not config.algorithm.objective.spec.is_policy_objective:
        return Pass("critic values", False, f"{_chosen(config)}: the objective has no advantages")
    reason = f"{advantage.estimator} uses {BASELINE_KINDS[advantage.spec.comparison]}"
    if config.actor_has_values:
        reason = "critic.shared_backbone=true: the pass for old log-probs computes them"
    return Pass("critic values", config.has_critic, reason)


def _chosen(config: Config) -> str:
    return f"algorithm.objective.name={config.algorithm.objective.name}"


def _reference(kl: KL) -> str:
    if kl.renew_steps is None:
        return "the reference is the model that the run starts from"
    if kl.renew_share == 1:
        return f"the policy replaces the reference every {kl.renew_steps} steps"
    return f"the reference moves {kl.renew_share:g} of the way to the policy every {kl.renew_steps} steps"


def _old_log_probs(config: Config) -> Pass:
    updates = config.batch.prompts_per_step // config.batch.prompts_per_update
    from_rollout = config.algorithm.correction.old == "rollout"
    if not config.algorithm.objective.spec.is_policy_objective:
        return Pass("old log-probs", False, f"{_chosen(config)}: the objective has no ratio to an old policy")
    if updates * config.batch.epochs > 1 and not from_rollout:
        per_step = f"{updates} updates per step" if updates > 1 else "one update per step"
        again = "" if config.batch.epochs == 1 else f" in each of {config.batch.epochs} epochs"
        return Pass("old log-probs", True, f"{per_step}{again}: the policy moves between them")
    if config.kl_in_reward:
        return Pass("old log-probs", True, "algorithm.kl.placement=reward: the rewards include a KL term")
    if config.distills_by_advantage and not from_rollout:
        reason = "algorithm.distillation.placement=advantage: the advantages include the KL to the teachers"
        return Pass("old log-probs", True, reason)
    if config.algorithm.trust_region.kl_limit is not None:
        return Pass(
            "old log-probs", True, "algorithm.trust_region: the update compares trial steps with the old policy"
        )
    if config.algorithm.objective.spec.selects_tokens and not from_rollout:
        reason = "the objective selects tokens by their covariance over a whole update"
        return Pass("old log-probs", True, f"{_chosen(config)}: {reason}")
    if config.actor_has_values:
        return Pass("old log-probs", True, "critic.shared_backbone=true: the same pass computes the critic's values")
    if from_rollout:
        reason = "algorithm.correction.old=rollout: the engine's log-probs approximate them"
        return Pass("old log-probs", False, reason)
    reason = "one update per step: the updated policy is the old policy"
    if not config.algorithm.objective.spec.adds_noise:
        reason += ", and the ratio is exp(lp − lp.detach())"
    return Pass("old log-probs", False, reason)
