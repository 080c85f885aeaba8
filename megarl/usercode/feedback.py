"""Feedback for teachers, which user code returns with a reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.core.text import encodable

MAX_FEEDBACK = 32_000
"""Maximum number of characters of the feedback from one source on a sample. Longer texts lose their end."""


def split_feedback(value: Any) -> tuple[Any, str]:
    """Return the reward and the feedback in a value that user code returned as a reward. Only a dict with the keys
    `reward` and `feedback` contains feedback, as text or None."""
    if isinstance(value, dict) and value.keys() == {"reward", "feedback"} and isinstance(value["feedback"], str | None):
        return value["reward"], encodable((value["feedback"] or "")[:MAX_FEEDBACK])
    return value, ""


def join_feedback(texts: Iterable[str]) -> str:
    """Join feedback texts with blank lines, without empty texts."""
    return "\n\n".join(filter(None, texts))
