"""The schema of section `data`."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megarl.config.fields import Section, Text
from megarl.core.ranges import FiniteFloat, PositiveFloat, PositiveInt

OWN_TASKS = "environment"
"""The source for environments that generate their own tasks."""


def reasoning_task(source: str) -> str | None:
    """Return the reasoning-gym task that a source names, or None for other sources."""
    package, separator, task = source.partition(":")
    return task if package == "reasoning_gym" and separator else None


def is_procedural(source: str) -> bool:
    """Return whether rows are generated rather than read from a file."""
    return source in ("arithmetic", OWN_TASKS) or reasoning_task(source) is not None


def _iso_date(value: Any) -> Any:
    """Return a date as YYYY-MM-DD. YAML parses it as a date object if it is not quoted."""
    try:
        return value if value is None else datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError as error:
        raise ValueError(f"data.date={value}: not a date ({error}). Fix: set data.date=YYYY-MM-DD or null") from None


class Data(Section):
    source: Text
    more_sources: list[Text]
    source_weights: dict[str, PositiveFloat]
    options: dict[str, Any]
    stages: list[dict[str, Any]]
    format: Literal["prompts", "messages", "preferences", "labels"]
    size: PositiveInt | None
    prompt_column: str
    system_prompt: Text | None
    date: Annotated[str | None, BeforeValidator(_iso_date)]
    answer_column: str
    response_column: Text | None
    image_column: Text | None
    image_folders: list[Text]
    min_pixels: PositiveInt | None
    max_pixels: PositiveInt | None
    source_column: Text | None
    messages_column: str
    chosen_column: str
    rejected_column: str
    steps_column: str
    labels_column: str
    step_end: str
    chat_template: bool
    overlong: Literal["refuse", "drop"]
    shuffle: bool
    sort_column: Text | None
    weight_column: Text | None
    solved_weight: Annotated[float, Field(gt=0, le=1)] | None
    solved_above: FiniteFloat

    @property
    def reasoning_task(self) -> str | None:
        """The reasoning-gym task; None for other sources."""
        return reasoning_task(self.source)

    @property
    def is_procedural(self) -> bool:
        """Whether rows are generated rather than read from a file."""
        return is_procedural(self.source)

    @property
    def sources(self) -> list[str]:
        """All data files, or the procedural source."""
        return [self.source, *self.more_sources]

    @property
    def draws_by_weight(self) -> bool:
        """Whether prompts are drawn by weight instead of once per epoch."""
        return self.weight_column is not None or self.solved_weight is not None or bool(self.source_weights)

    @property
    def given_columns(self) -> dict[str, str]:
        """The column with given responses, if any -> the key that names it."""
        return {} if self.response_column is None else {self.response_column: "data.response_column"}

    @property
    def ordering_columns(self) -> dict[str, str]:
        """Numeric columns that rows are sorted or drawn by -> the key that names the column."""
        keys = {"data.sort_column": self.sort_column, "data.weight_column": self.weight_column}
        return {column: key for key, column in keys.items() if column is not None}
