"""Tool calls that a policy writes in a turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 64
"""Maximum number of tool calls parsed per turn. The policy receives one error message for all further calls."""


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
