"""The schema of section `algorithm`. The options of estimators and objectives come from their specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS, STEP_KLS, DivergenceKind, annealed, metric_name
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES, spec_in_file
from megarl.algorithms.specs import EstimatorSpec, ObjectiveSpec, Option
from megarl.algorithms.transition import StepWeight
from megarl.config.fields import Section
from megarl.core.errors import UserError
from megarl.core.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt
from megarl.core.user_file import is_in_file

if TYPE_CHECKING:
    KLEstimatorName = TokenKL = Aggregation = str
else:  # type checkers cannot evaluate these tables
    KLEstimatorName, Aggregation = Literal[(*KL_ESTIMATORS, *STEP_KLS)], Literal[tuple(AGGREGATIONS)]
    TokenKL = Literal[tuple(KL_ESTIMATORS)]


class Variant(Section):
    """A section that names a registry entry and has the entry's options in addition to its own fields.

    The entry is one of megarl's or `path/to/file.py:NAME`, a spec defined in a user's file. Options of other entries
    are unknown keys. Omitted options have the spec's defaults. If a recipe names a different entry than its base
    recipe, it inherits the section's own fields but not the options of the base's entry (see `megarl.config.load`).
    Options are validated with the model that `_model` builds from the spec, and stored as pydantic extra values.
    """

    model_config = ConfigDict(extra="allow")

    key: ClassVar[str]
    """The dotted key that names the entry."""
    discriminator: ClassVar[str]
    """The last part of `key`."""
    entries: ClassVar[Mapping[str, Any]]
    kind: ClassVar[type]

    def __init_subclass__(cls, **_: Any) -> None:
        cls.discriminator = cls.key.rpartition(".")[2]

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, values: Any) -> Any:
        """Check all keys against the entry and add the defaults of omitted options."""
        name = values.get(cls.discriminator) if isinstance(values, dict) else None
        if not isinstance(name, str) or not (name in cls.entries or is_in_file(name)):
            return values
        if is_in_file(name):
            values = values | {cls.discriminator: str(Path(name).expanduser().absolute())}
        return cls._model(values[cls.discriminator]).model_validate(values).model_dump()

    @classmethod
    def _model(cls, name: str) -> type[Section]:
        """Build a pydantic model from the section's fields and an entry's options."""
        shared: dict[str, Any] = {key: (field.annotation, field) for key, field in cls.model_fields.items()}
        return create_model(cls.__name__, __base__=Section, **shared, **cls._parameters(name))

    @classmethod
    def option_names(cls, name: str) -> list[str]:
        """Return the names of an entry's options."""
        return [option for option in cls._parameters(name) if option != HASH]

    @classmethod
    def _parameters(cls, name: str) -> Mapping[str, Any]:
        return cls.entries[name].all_parameters if name in cls.entries else cls._parameters_in_file(name)

    @classmethod
    def _parameters_in_file(cls, name: str) -> dict[str, Any]:
        """Return the options of a user's entry, including the file's hash, so that workers and resumed runs detect
        changes to the file."""
        spec, content = spec_in_file(cls.key, name, cls.kind)
        if taken := sorted(spec.all_parameters.keys() & cls.model_fields.keys()):
            raise UserError(
                f"{cls.key}={name}: option {taken[0]} has the name of another key in the section. Fix: rename the "
                "option"
            )
        return {**spec.all_parameters, HASH: (Literal[content], content)}

    @property
    def _spec(self) -> Any:
        name = getattr(self, self.discriminator)
        if name in self.entries:
            return self.entries[name]
        spec, content = spec_in_file(self.key, name, self.kind)
        if content != self.option(HASH):
            raise UserError(
                f"{self.key}={name}: the file has changed since the run started. Fix: restore its content, or start "
                "a new run with another run.name"
            )
        return spec

    @property
    def file(self) -> tuple[Path, str] | None:
        """The user's file that defines the entry, and the hash of its content; None for a megarl entry."""
        name = getattr(self, self.discriminator)
        return (Path(name.rpartition(":")[0]), self.option(HASH)) if is_in_file(name) else None

    def option(self, name: str) -> Any:
        """Return the value of one of the entry's options."""
        return (self.model_extra or {})[name]

    def options(self, names: Iterable[str] | None = None) -> dict[str, Option]:
        """Return the values of the named options; None selects all options of the entry."""
        return {name: self.option(name) for name in (self._spec.options if names is None else names)}


HASH = "sha256"
"""The option of a user's entry that holds the hash of its file."""


def _named(entries: Mapping[str, Any]) -> AfterValidator:
    """Return the validator for a config key that names a registry entry or a spec in a file."""
    names = ", ".join(map(repr, entries))

    def check(name: str) -> str:
        if name in entries or is_in_file(name):
            return name
        raise PydanticCustomError("literal_error", "", {"expected": f"{names} or path/to/file.py:NAME"})

    return AfterValidator(check)


class Advantage(Variant):
    key = "algorithm.advantage.estimator"
    entries = ESTIMATORS
    kind = EstimatorSpec

    estimator: Annotated[str, _named(ESTIMATORS)]

    @property
    def spec(self) -> EstimatorSpec:
        return self._spec

    @property
    def credits_to_go(self) -> bool:
        """Whether a token's reward counts only for the tokens up to and including it, rather than for the whole
        sample."""
        return (self.model_extra or {}).get("credit", "reward_to_go") == "reward_to_go"


class Objective(Variant):
    key = "algorithm.objective.name"
    entries = OBJECTIVES
    kind = ObjectiveSpec

    name: Annotated[str, _named(OBJECTIVES)]
    aggregation: Aggregation
    step_weight: StepWeight
    skip_truncated: bool
    empty_samples: Literal["include", "exclude"]
    entropy_coefficient: FiniteFloat
    imitation_coefficient: NonNegativeFloat
    imitation_above: FiniteFloat

    @property
    def spec(self) -> ObjectiveSpec:
        return self._spec

    @property
    def adapted_penalty_target(self) -> float | None:
        """The target divergence from the old policy for adapting the penalty; None if the penalty is constant."""
        return (self.model_extra or {}).get("penalty_target")

    @property
    def is_without_nll(self) -> bool:
        """Whether supervised fine-tuning has no loss of its own, so that the actor learns from teachers alone."""
        return self.name == "sft" and self.option("nll_coefficient") == 0


VARIANTS: tuple[type[Variant], ...] = (Advantage, Objective)


class Value(Section):
    coefficient: PositiveFloat
    clip: PositiveFloat | None
    aggregation: Aggregation


class KL(Section):
    placement: Literal["loss", "reward"]
    level: Literal["token", "sequence"]
    estimator: KLEstimatorName | None
    """Never None once the whole configuration is loaded."""
    straight_through: bool
    limit: PositiveFloat | None
    coefficient: NonNegativeFloat
    adaptive_target: PositiveFloat | None
    adaptive_horizon: PositiveInt
    renew_steps: PositiveInt | None
    renew_share: Annotated[float, Field(gt=0, le=1)]

    def renews_after(self, step: int) -> bool:
        return self.renew_steps is not None and step % self.renew_steps == 0


class Distillation(Section):
    divergence: Literal["sampled"] | DivergenceKind
    top_k: PositiveInt | None
    beta: Annotated[float, Field(ge=0, le=1)]
    placement: Literal["advantage", "loss"]
    estimator: TokenKL | None
    """Not None after loading if the config has teachers and a sampled divergence."""
    limit: PositiveFloat | None
    coefficient: NonNegativeFloat
    anneal_steps: PositiveInt | None
    final_coefficient: NonNegativeFloat
    on_policy_share: Annotated[float, Field(gt=0, le=1)]

    @property
    def is_used(self) -> bool:
        """Whether the coefficient is positive in some step."""
        return self.coefficient > 0 or (self.anneal_steps is not None and self.final_coefficient > 0)

    def coefficient_in(self, step: int) -> float:
        """Return the coefficient for this step, counting from 1."""
        if self.anneal_steps is None:
            return self.coefficient
        return annealed(self.coefficient, self.final_coefficient, self.anneal_steps, step)

    @property
    def is_sampled(self) -> bool:
        """Whether the divergence is estimated from the sampled tokens instead of computed from distributions."""
        return self.divergence == "sampled"

    @property
    def is_exact(self) -> bool:
        """Whether the divergence compares distributions over the full vocabulary."""
        return not self.is_sampled and self.top_k is None


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
    distillation: Distillation
    trust_region: TrustRegion

    @property
    def whitens_step(self) -> bool:
        """Whether advantages are whitened over all updates of a step."""
        advantage = self.advantage
        has_effect = self.objective.spec.is_policy_objective and advantage.option("whiten")
        return bool(has_effect) and advantage.option("whiten_over") == "step"

    @property
    def kl_metric(self) -> str:
        """The metric name for the divergence from the reference policy."""
        kl = self.kl
        assert kl.estimator is not None, "the configuration is not loaded"
        return metric_name(kl.placement, self.advantage.credits_to_go, kl.level, kl.estimator, kl.straight_through)
