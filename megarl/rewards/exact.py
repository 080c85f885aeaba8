"""Exact comparison of a response with the answer."""

from __future__ import annotations

from typing import Any

from megarl.rewards.options import checks_rows


def _require_answer(answer: Any) -> None:
    if answer is None:
        raise ValueError("exact_match: the prompt has no answer (null). Fix: add an answer to the row")


@checks_rows(_require_answer)
def exact_match(prompt: str, response: str, answer: Any) -> bool:
    """Return whether the response equals str(answer), apart from surrounding whitespace. Case, punctuation and the
    notation of numbers ("12" and "12.0") matter. Raise ValueError if the prompt has no answer."""
    _require_answer(answer)
    return response.strip() == str(answer).strip()
