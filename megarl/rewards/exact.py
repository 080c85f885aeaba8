"""Compares a response with the answer, character by character."""

from __future__ import annotations

from typing import Any


def exact_match(prompt: str, response: str, answer: Any) -> bool:
    """Returns whether response and str(answer) are equal once the whitespace around both is stripped; nothing else is
    normalised (case, punctuation, "12" against "12.0").

    Raises ValueError if there is no answer to compare with.
    """
    if answer is None:
        raise ValueError("the prompt has no answer (null); exact_match needs one")
    return response.strip() == str(answer).strip()
