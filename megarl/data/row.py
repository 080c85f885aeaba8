"""Rows of a data set before tokenization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""One turn of a conversation: {"role": …, "content": …}. The content is text or, in prompts with images, a list of
parts: {"type": "text", "text": …} or {"type": "image"}."""

Content = str | list[Message]
"""Text, or messages that continue a conversation."""


def as_messages(content: Content, role: str) -> list[Message]:
    """Return a list of messages unchanged, and plain text as one message with the given role."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and its answer.

    Attributes:
        number: 1-based number within the file or generator.
        answer: any JSON value.
        columns: additional requested columns, as JSON values.
        source: the file, or the generator's name.
        images: values of data.image_column; after ImageRows.load, LoadedImages in the order of their placeholders.
    """

    number: int
    prompt: Content
    answer: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A conversation whose assistant turns are trained on. `images`: see Row."""

    number: int
    messages: list[Message]
    source: str = ""
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt and two responses, each given as text or as messages that continue the prompt. `images`: see Row."""

    number: int
    prompt: Content
    chosen: Content
    rejected: Content
    source: str = ""
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelRow:
    """A prompt and a response that consists of labeled steps.

    Attributes:
        steps: the text of each step, or the token ids of the response; each token is then a step.
        labels: label of each step, from 0 to 1; None for a step without a label.
    """

    number: int
    prompt: Content
    steps: list[str] | list[int]
    labels: list[float | None]
    source: str = ""
