"""The schema of section `evaluation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import EnvironmentClass, RewardFunction, Section, Text
from megarl.core.ranges import FiniteFloat, PositiveInt, Temperature


class SetEnvironment(EnvironmentClass):
    options: dict[str, Any] = Field(default_factory=dict)


class EvaluationSet(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    source: Text | None = None
    size: PositiveInt | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    image_column: str | None = None
    system_prompt: str | None = None
    chat_template: bool | None = None
    samples_per_prompt: PositiveInt = 1
    temperature: Temperature = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    stop: list[Text] = Field(default_factory=list)
    functions: list[RewardFunction] | None = None
    environment: SetEnvironment | None = None
    success_above: FiniteFloat = 0.5
    every_steps: PositiveInt | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the set's metric names."""
        return f"evaluation/{self.name}/"


class Best(Section):
    metric: Text | None
    mode: Literal["max", "min"]


class Evaluation(Section):
    every_steps: PositiveInt | None
    at_start: bool
    at_end: bool
    best: Best
    sets: list[EvaluationSet]

    def interval(self, evaluation_set: EvaluationSet) -> int | None:
        """Return a set's evaluation interval in steps; None if it is not evaluated between start and end."""
        return evaluation_set.every_steps or self.every_steps

    def due(self, step: int, last: int) -> list[EvaluationSet]:
        """Return the sets to evaluate after `step` (0: before the first step). `last` is the run's last step."""
        if step == 0:
            return self.sets if self.at_start else []
        if step == last and self.at_end:
            return self.sets
        return [item for item in self.sets if (every := self.interval(item)) is not None and step % every == 0]
