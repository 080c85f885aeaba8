"""The base class of configuration sections, and types shared by several sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from megarl.core.ranges import FiniteFloat


class Section(BaseModel):
    """A section of keys. Unknown keys are rejected, types are not coerced, and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Text = Annotated[str, Field(min_length=1)]
"""Non-empty text."""

OptionalText = Text | None


class RewardFunction(Section):
    function: Text
    weight: FiniteFloat = 1.0
    per_turn: bool = False
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    sources: list[Text] | None = None

    @property
    def label(self) -> str:
        """The function's name in scores and metrics. For a user's `path/to/file.py:NAME`, it is NAME."""
        return self.function.rpartition(":")[2] if self.name is None else self.name

    def applies_to(self, source: Any) -> bool:
        """Return whether the function scores rows from this source."""
        return self.sources is None or source in self.sources


_KEYS: dict[str, Any] = {"class": (OptionalText, ...)}
_Class = create_model("_Class", __base__=Section, **_KEYS)
"""A section with the key `class`, a keyword that Python does not accept as a field name."""


class EnvironmentClass(_Class):
    """A section that may name an environment class."""

    @property
    def name(self) -> str | None:
        """The value of the key `class`."""
        return getattr(self, "class")
