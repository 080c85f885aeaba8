"""One row of a data set, before it is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]
"""One turn of a conversation: {"role": …, "content": …}."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and its answer.

    number    1-based, in the file or the procedure
    source    the file, or what made it
    answer    anything that JSON can hold
    columns   further ones that were asked for, as JSON values
    """

    number: int
    prompt: str | list[Message]
    answer: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A conversation, whose assistant turns are learned from."""

    number: int
    messages: list[Message]
    source: str = ""


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt, and two responses to it: text, or messages that go on after it."""

    number: int
    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]
    source: str = ""


@dataclass(frozen=True, slots=True)
class LabelRow:
    """A prompt, and a response in steps that have labels.

    steps    the text of each, or the token ids of the response, each of which then is a step
    labels   of each step, from 0 to 1; None for one without
    """

    number: int
    prompt: str | list[Message]
    steps: list[str] | list[int]
    labels: list[float | None]
    source: str = ""
