"""The base of all sections of the configuration, the ranges of numbers in them, and what several of them list."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of keys: unknown ones are refused, types are not coerced, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RewardFunction(Section):
    function: Annotated[str, Field(min_length=1)]
    weight: FiniteFloat = 1.0
    per_turn: bool = False
