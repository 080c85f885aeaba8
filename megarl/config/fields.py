"""The base class of all configuration sections, and the parts that several sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from megarl.core.ranges import FiniteFloat


class Section(BaseModel):
    """A group of keys: unknown ones are refused, types are not coerced, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RewardFunction(Section):
    function: Annotated[str, Field(min_length=1)]
    weight: FiniteFloat = 1.0
    per_turn: bool = False
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    sources: list[Annotated[str, Field(min_length=1)]] | None = None

    @property
    def label(self) -> str:
        """The name of the function's part in scores and metrics."""
        return self.function if self.name is None else self.name

    def applies_to(self, source: Any) -> bool:
        """Returns whether it judges the rows of a source."""
        return self.sources is None or source in self.sources


_Class = create_model("_Class", __base__=Section, **{"class": (Annotated[str, Field(min_length=1)] | None, ...)})
"""A section with the key `class`, which Python has no way to write as a field."""


class EnvironmentClass(_Class):
    """A section that names the class of an environment, or none."""

    @property
    def name(self) -> str | None:
        """The key `class`."""
        return getattr(self, "class")
