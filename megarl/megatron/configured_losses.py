"""A recipe's losses: functions from `losses` and `loss_metrics` with the recipe's values bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megarl.algorithms import corrections, kl
from megarl.algorithms.specs import (
    ImitationObjective,
    LabelObjective,
    PairObjective,
    PolicyObjective,
    VelocityObjective,
)
from megarl.algorithms.transition import TransitionKind
from megarl.config.algorithm_schema import Algorithm, Distillation, Objective, Value
from megarl.config.logprob_check_schema import Tolerance
from megarl.config.model_schema import ImplicitReward, Teacher
from megarl.megatron import added_losses, denoising_losses, loss_metrics, losses
from megarl.megatron.losses import Loss, Terms
from megarl.megatron.metric_sums import Sums

if TYPE_CHECKING:
    import torch

    from megarl.core.token_batch import TokenBatch


def configured_policy_loss(
    algorithm: Algorithm,
    tolerance: Tolerance,
    kl_coefficient: float,
    *,
    has_moved: bool = False,
    penalty: float | None = None,
    teachers: Sequence[Teacher] = (),
) -> Loss:
    """Return the actor's policy loss, which is weighted by advantages.

    Args:
        tolerance: allowed difference between the engine's log-probs and the trainer's at the start of the step.
        kl_coefficient: the KL coefficient in this step.
        has_moved: whether the policy has been updated since the start of the step.
        penalty: the objective's penalty in this step; None uses the recipe's penalty.
        teachers: the teachers whose log-probs the batches contain.
    """
    settings = algorithm.kl
    assert settings.estimator is not None, "the configuration is not loaded"
    estimate = partial(
        losses.token_kl,
        in_reward=settings.placement == "reward",
        level=settings.level,
        estimator=settings.estimator,
        straight_through=settings.straight_through,
        limit=settings.limit,
    )
    options = _policy_options(algorithm, tolerance, kl_coefficient, has_moved, penalty)
    if teachers and algorithm.distillation.placement == "loss" and algorithm.distillation.is_sampled:
        options["distillation"] = configured_distillation(algorithm.distillation, teachers)
    terms = partial(losses.policy_loss, **options, estimate_kl=estimate)
    metrics = _policy_metrics(algorithm, tolerance, kl_coefficient, has_moved, options, teachers)
    return Loss(terms, metrics)


def configured_distillation(
    distillation: Distillation, teachers: Sequence[Teacher]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return `kl.distillation` with a recipe's values bound. The coefficient is part of the weights."""
    assert distillation.estimator is not None, "the configuration is not loaded"
    return partial(
        kl.distillation,
        weights=[distillation.coefficient * teacher.weight for teacher in teachers],
        estimator=distillation.estimator,
        limit=distillation.limit,
    )


class Denoising(Protocol):
    """How denoising steps are sampled: the transition's kind and noise level, and the reduction of its log-prob."""

    @property
    def kind(self) -> TransitionKind: ...
    @property
    def noise_level(self) -> float: ...
    @property
    def logprob(self) -> Literal["mean", "sum"]: ...


def configured_denoising_loss(
    algorithm: Algorithm,
    denoising: Denoising,
    tolerance: Tolerance,
    kl_coefficient: float,
    *,
    has_moved: bool,
    penalty: float | None = None,
) -> Loss:
    """Return an image model's policy loss, from a StepBatch and its velocities. For the remaining arguments, see
    `configured_policy_loss`."""
    if isinstance(spec := algorithm.objective.spec, VelocityObjective):
        objective = partial(spec.loss, **algorithm.objective.options(spec.arguments))
        shared: dict[str, Any] = dict(kl_coefficient=kl_coefficient, has_moved=has_moved)
        metrics = partial(loss_metrics.velocity_metrics, kl_name=algorithm.kl_metric, **shared)
        return Loss(partial(denoising_losses.velocity_loss, objective=objective, **shared), metrics)
    options = _policy_options(algorithm, tolerance, kl_coefficient, has_moved, penalty)
    estimator = algorithm.kl.estimator
    assert estimator == "gaussian" or estimator == "velocity", f"{estimator} is not a KL of denoising steps"
    terms = partial(
        denoising_losses.denoising_loss,
        kind=denoising.kind,
        noise_level=denoising.noise_level,
        reduction=denoising.logprob,
        policy=partial(losses.policy_loss, **options),
        kl=estimator,
        has_moved=has_moved,
    )
    return Loss(terms, _policy_metrics(algorithm, tolerance, kl_coefficient, has_moved, options))


def _policy_options(
    algorithm: Algorithm, tolerance: Tolerance, kl_coefficient: float, has_moved: bool, penalty: float | None
) -> dict[str, Any]:
    """Return the options of `losses.policy_loss` that do not depend on the kind of rows."""
    objective, correction = algorithm.objective, algorithm.correction
    spec = objective.spec
    assert isinstance(spec, PolicyObjective), f"{spec.name} is not a policy objective"
    options: dict[str, Any] = dict(objective.options(spec.arguments))
    if penalty is not None:
        options["penalty"] = penalty
    return dict(
        objective=spec,
        options=options,
        old_is_rollout=correction.old == "rollout",
        has_moved=has_moved,
        correct=partial(corrections.factors, **correction.model_dump(exclude={"old"})),
        exclude=None
        if tolerance.mask is None
        else partial(corrections.disagreeing, threshold=tolerance.threshold, level=tolerance.mask),
        kl_coefficient=kl_coefficient if algorithm.kl.placement == "loss" else None,
        distillation=None,
        entropy_coefficient=objective.entropy_coefficient,
        imitation_coefficient=objective.imitation_coefficient,
        value_coefficient=algorithm.value.coefficient,
        value_clip=algorithm.value.clip,
    )


def _policy_metrics(
    algorithm: Algorithm,
    tolerance: Tolerance,
    kl_coefficient: float,
    has_moved: bool,
    options: dict[str, Any],
    teachers: Sequence[Teacher] = (),
) -> Callable[[Any, Any], Sums]:
    return partial(
        loss_metrics.policy_metrics,
        mismatch_threshold=tolerance.threshold,
        has_moved=has_moved,
        penalty=None if algorithm.objective.adapted_penalty_target is None else options["options"]["penalty"],
        kl_name=algorithm.kl_metric,
        kl_level=algorithm.kl.level,
        kl_coefficient=kl_coefficient,
        teachers=[teacher.name for teacher in teachers],
    )


def configured_preference_loss(objective: Objective, tolerance: Tolerance | None, *, has_moved: bool = False) -> Loss:
    """Return the actor's loss on preference pairs. `tolerance` is None if the pairs were not sampled by an engine."""
    spec = objective.spec
    assert isinstance(spec, PairObjective), f"{spec.name} is not a pair objective"
    terms = partial(
        losses.preference_loss,
        objective=spec,
        options=objective.options(spec.arguments),
        beta=objective.option("beta") if spec.reads_reference else None,
        length_normalised=objective.option("length_normalised"),
        has_moved=has_moved,
    )
    threshold = None if tolerance is None else tolerance.threshold
    metrics = partial(loss_metrics.preference_metrics, mismatch_threshold=threshold, has_moved=has_moved)
    return Loss(terms, metrics)


def configured_imitation_loss(objective: Objective) -> Loss:
    spec = objective.spec
    assert isinstance(spec, ImitationObjective), f"{spec.name} is not an imitation objective"
    token_loss = partial(spec.loss, **objective.options(spec.arguments))
    return Loss(partial(losses.imitation_loss, token_loss=token_loss), loss_metrics.imitation_metrics)


def configured_reward_model_loss(objective: Objective) -> Loss:
    """Return a reward model's loss on sample pairs or on token labels."""
    spec, options = objective.spec, objective.options(objective.spec.arguments)
    if isinstance(spec, PairObjective):
        terms = partial(losses.reward_model_loss, objective=spec, options=options)
        return Loss(terms, loss_metrics.reward_model_metrics)
    assert isinstance(spec, LabelObjective), f"{spec.name} is not a label objective"
    terms = partial(losses.label_loss, token_loss=partial(spec.loss, **options))
    return Loss(terms, loss_metrics.label_metrics)


def configured_value_loss(value: Value) -> Loss:
    terms = partial(losses.value_loss, coefficient=value.coefficient, clip=value.clip)
    return Loss(terms, loss_metrics.value_metrics)


def configured_implicit_reward_loss(settings: ImplicitReward) -> Loss:
    terms = partial(losses.implicit_reward_loss, beta=settings.beta, success_above=settings.success_above)
    return Loss(terms, loss_metrics.implicit_reward_metrics)


def on_sampled_tokens(loss: Loss) -> Loss:
    """Return the loss with given responses excluded. They have neither advantages nor log-probs from an engine."""

    def terms(batch: TokenBatch, scored: torch.Tensor) -> Terms:
        return loss.terms(batch.only_sampled, scored)

    def metrics(batch: TokenBatch, terms: Terms) -> Sums:
        return loss.metrics(batch.only_sampled, terms)

    return Loss(terms, metrics)


def with_mtp_loss(loss: Loss, coefficient: float) -> Loss:
    """Return the sum of the loss and the MTP loss."""
    terms = partial(added_losses.mtp_loss, others=loss.terms, coefficient=coefficient)
    return Loss(terms, partial(loss_metrics.mtp_metrics, others=loss.metrics))


def with_distillation_loss(loss: Loss, distillation: Distillation, teachers: Sequence[Teacher]) -> Loss:
    """Return the sum of the loss and the teacher divergence that the head computes."""
    weights = [distillation.coefficient * teacher.weight for teacher in teachers]
    terms = partial(added_losses.distillation_loss, others=loss.terms, weights=weights)
    names = [teacher.name for teacher in teachers]
    return Loss(terms, partial(loss_metrics.distillation_metrics, others=loss.metrics, teachers=names))
