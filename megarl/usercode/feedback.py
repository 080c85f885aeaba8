"""Feedback for teachers that user code returns with a reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from megarl.core.text import encodable

MAX_FEEDBACK = 32_000
"""Maximum length of one source's feedback on a sample, in characters. Longer texts are truncated at the end."""


def split_feedback(value: Any) -> tuple[Any, str]:
    """Split a value returned by user code into the reward and the feedback. Only a dict with exactly the keys `reward`
    and `feedback` contains feedback, as text or None. If `feedback` is a number, both values are named rewards. Raise a
    TypeError for any other feedback."""
    if not isinstance(value, Mapping) or value.keys() != {"reward", "feedback"}:
        return value, ""
    feedback = value["feedback"]
    if isinstance(feedback, SupportsFloat):
        return value, ""
    if not isinstance(feedback, str | None):
        raise TypeError(f"feedback is a {type(feedback).__name__}. Fix: return text or None")
    return value["reward"], encodable((feedback or "")[:MAX_FEEDBACK])


def join_feedback(texts: Iterable[str]) -> str:
    """Join feedback texts with blank lines, without empty texts."""
    return "\n\n".join(filter(None, texts))
