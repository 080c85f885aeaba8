"""The calls of tools that a turn makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a turn makes."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A part of a turn that begins as a call of a tool, and is none. reason: for the model to read."""

    text: str
    reason: str
