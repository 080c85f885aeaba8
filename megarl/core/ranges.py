"""Pydantic types for numbers within a range."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2)]
"""A sampling temperature that vLLM accepts."""
Share = Annotated[float, Field(ge=0, le=1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
