"""The schema of the section `algorithm`: names and options of estimators and objectives are those of the registry."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS, metric_name, usual_estimator
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.specs import EstimatorSpec, ObjectiveSpec, Option, Options
from megarl.config.fields import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share

EstimatorName = Literal[tuple(ESTIMATORS)]
ObjectiveName = Literal[tuple(OBJECTIVES)]
KLEstimatorName = Literal[tuple(KL_ESTIMATORS)]
Aggregation = Literal[tuple(AGGREGATIONS)]


class RegistryOptions(Section):
    """A choice from a registry by its name, with the options of every entry. An option that is None has the value that
    the chosen entry's spec gives it; an option that this does not read is None."""

    @property
    def spec(self) -> EstimatorSpec | ObjectiveSpec:
        raise NotImplementedError

    def option(self, name: str) -> Any:
        """Returns the value of one of the options that the chosen entry reads."""
        value = getattr(self, name)
        return self.spec.options[name] if value is None else value

    def options(self, names: Options | None = None) -> dict[str, Option]:
        """Returns the values of these options, or of all that the chosen entry reads."""
        return {name: self.option(name) for name in (self.spec.options if names is None else names)}


class Advantage(RegistryOptions):
    estimator: EstimatorName
    gamma: Share | None
    gae_lambda: Share | None
    critic_lambda: Share | None
    length_alpha: PositiveFloat | None
    credit: Literal["whole", "reward_to_go"] | None
    whiten: bool | None
    whiten_over: Literal["update", "step"] | None
    whiten_std: Literal["sample", "population", "none"] | None
    whiten_epsilon: NonNegativeFloat | None
    std: Literal["sample", "population", "none"] | None
    std_epsilon: NonNegativeFloat | None
    group_of_one: Literal["zero", "reward"] | None
    baseline_decay: Share | None
    k: PositiveInt | None
    pass_at_k_baseline: Literal["all", "without"] | None

    @property
    def spec(self) -> EstimatorSpec:
        return ESTIMATORS[self.estimator]

    @property
    def credits_to_go(self) -> bool:
        """Whether rewards of single tokens count for the tokens up to theirs, instead of for the whole sample."""
        return "credit" not in self.spec.options or self.option("credit") == "reward_to_go"


class Objective(RegistryOptions):
    name: ObjectiveName
    clip_low: PositiveFloat | None
    clip_high: PositiveFloat | None
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None
    penalty: PositiveFloat | None
    penalty_target: PositiveFloat | None
    tau_positive: PositiveFloat | None
    tau_negative: PositiveFloat | None
    divergence_limit: PositiveFloat | None
    divergence_limit_negative: PositiveFloat | None
    covariance_low: FiniteFloat | None
    covariance_high: FiniteFloat | None
    covariance_share: Annotated[float, Field(gt=0, le=1)] | None
    tau: PositiveFloat | None
    level: Literal["token", "sequence"] | None
    beta: PositiveFloat | None
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None
    length_normalised: bool | None
    hinge_margin: PositiveFloat | None
    regularisation: NonNegativeFloat | None
    aggregation: Aggregation
    skip_truncated: bool
    empty_samples: Literal["include", "exclude"]
    entropy_coefficient: FiniteFloat
    imitation_coefficient: NonNegativeFloat
    imitation_above: FiniteFloat

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVES[self.name]

    @property
    def adapted_penalty_target(self) -> float | None:
        """The divergence from the old policy towards which the penalty is adapted (None: it stays)."""
        return self.option("penalty_target") if "penalty_target" in self.spec.options else None


class Value(Section):
    coefficient: PositiveFloat
    clip: PositiveFloat | None
    aggregation: Aggregation


class KL(Section):
    placement: Literal["loss", "reward"]
    level: Literal["token", "sequence"]
    estimator: KLEstimatorName | None
    """Never None once the configuration is loaded."""
    straight_through: bool
    limit: PositiveFloat | None
    coefficient: NonNegativeFloat
    adaptive_target: PositiveFloat | None
    adaptive_horizon: PositiveInt
    renew_steps: PositiveInt | None
    renew_share: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _estimator_of_its_place(self) -> Self:
        """Decides estimator=null: the estimator that the papers have at this place."""
        if self.estimator is not None:
            return self
        return self.model_copy(update={"estimator": usual_estimator(self.placement, self.level)})

    def renews_after(self, step: int) -> bool:
        return self.renew_steps is not None and step % self.renew_steps == 0


class TrustRegion(Section):
    kl_limit: PositiveFloat | None
    iterations: PositiveInt
    damping: NonNegativeFloat
    trials: PositiveInt


class Correction(Section):
    old: Literal["trainer", "rollout"]
    weight: Literal["auto", "token", "sequence", "geometric"] | None
    """Never "auto" once the whole configuration is loaded."""
    weight_limit: PositiveFloat | None
    weight_floor: PositiveFloat | None
    mask: Literal["token", "sequence", "geometric"] | None
    mask_low: NonNegativeFloat
    mask_high: PositiveFloat


class Algorithm(Section):
    advantage: Advantage
    objective: Objective
    correction: Correction
    value: Value
    kl: KL
    trust_region: TrustRegion

    @property
    def whitens_step(self) -> bool:
        """Whether advantages are whitened over all updates of a step."""
        advantage = self.advantage
        is_read = self.objective.spec.is_policy_objective and advantage.option("whiten")
        return bool(is_read) and advantage.option("whiten_over") == "step"

    @property
    def kl_metric(self) -> str:
        """The name of the metric of the divergence from the reference."""
        kl = self.kl
        return metric_name(kl.placement, self.advantage.credits_to_go, kl.level, kl.estimator, kl.straight_through)
