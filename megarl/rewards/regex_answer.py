"""Compares what a regular expression finds in a response with the answer."""

from __future__ import annotations

from collections import deque
from typing import Any

import regex


class RegexMatch:
    """Whether a pattern is found in the response. If it has a group called `answer`, the last match's must be equal to
    the answer, once the whitespace around both is stripped.

    Python's syntax, with the additions of the package `regex`. A search that takes longer than timeout_s, as
    catastrophic patterns do, raises TimeoutError: it is the failure of its sample alone, and its process lives on.
    """

    def __init__(self, pattern: str, whole: bool = False, ignore_case: bool = False, timeout_s: float = 1.0):
        """whole: the pattern must match the response from its beginning to its end, without whitespace around it."""
        try:
            self._pattern = regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
        except regex.error as error:
            raise ValueError(f"options.pattern={pattern!r} is no regular expression: {error}") from None
        if not timeout_s > 0:
            raise ValueError(f"options.timeout_s={timeout_s} is not more than 0")
        self._whole, self._ignores_case, self._timeout_s = whole, ignore_case, timeout_s
        self._compares = "answer" in self._pattern.groupindex

    def __call__(self, prompt: str, response: str, answer: Any) -> bool:
        """Raises ValueError if the pattern has a group for the answer, and there is none to compare with."""
        if self._compares and answer is None:
            raise ValueError("the prompt has no answer (null); a pattern with a group called answer needs one")
        found = self._last_match(response)
        if found is None or not self._compares:
            return found is not None
        said, expected = (found["answer"] or "").strip(), str(answer).strip()
        return said.casefold() == expected.casefold() if self._ignores_case else said == expected

    def _last_match(self, response: str) -> regex.Match[str] | None:
        if self._whole:
            return self._pattern.fullmatch(response.strip(), timeout=self._timeout_s)
        found = deque(self._pattern.finditer(response, timeout=self._timeout_s), maxlen=1)
        return found[0] if found else None
