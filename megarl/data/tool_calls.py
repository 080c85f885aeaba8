"""Tool calls that a policy writes in a turn, and the pieces into which parsers split its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 64
"""Maximum number of tool calls parsed per turn. The policy receives a single error message for all others."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed tool call."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Part of a turn that starts like a tool call but is not a valid one. `reason` is shown to the model."""

    text: str
    reason: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A tag and the text up to the next tag. The first piece of a turn has an empty tag."""

    tag: str
    text: str
