"""Compares a regular expression's match in a response with the answer."""

from __future__ import annotations

from collections import deque
from typing import Any

import regex


class RegexMatch:
    """Reward function that returns whether a pattern matches in the response. If the pattern has a group named
    `answer`, the group in the last match must equal the answer, ignoring surrounding whitespace. The syntax is Python's
    with the extensions from the `regex` package. A search that takes longer than timeout_s, for example because of
    catastrophic backtracking, or exceeds rewards.memory_mib counts as no match."""

    def __init__(self, pattern: str, whole: bool = False, ignore_case: bool = False, timeout_s: float = 1.0):
        """whole: whether the pattern must match the whole response, excluding surrounding whitespace."""
        try:
            self._pattern = regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
        except regex.error as error:
            raise ValueError(
                f"options.pattern={pattern!r}: not a valid regular expression: {error}. Fix: edit the pattern at this "
                "position"
            ) from None
        if not timeout_s > 0:
            raise ValueError(f"options.timeout_s={timeout_s}: must be positive. Fix: use a positive number of seconds")
        self._whole, self._ignores_case, self._timeout_s = whole, ignore_case, timeout_s
        self._compares = "answer" in self._pattern.groupindex

    def check_row(self, answer: Any) -> None:
        """Raise ValueError if the pattern has a group `answer` but the prompt has no answer."""
        if self._compares and answer is None:
            raise ValueError(
                "regex_match: the pattern has a group named answer, but the prompt has no answer (null). Fix: add an "
                "answer to the row, or rename the group"
            )

    def __call__(self, prompt: str, response: str, answer: Any) -> bool:
        """Score the response. Raise ValueError under the same conditions as `check_row`."""
        self.check_row(answer)
        try:
            match = self._last_match(response)
        except (TimeoutError, MemoryError):
            match = None
        if match is None or not self._compares:
            return match is not None
        matched, expected = (match["answer"] or "").strip(), str(answer).strip()
        return matched.casefold() == expected.casefold() if self._ignores_case else matched == expected

    def _last_match(self, response: str) -> regex.Match[str] | None:
        if self._whole:
            return self._pattern.fullmatch(response.strip(), timeout=self._timeout_s)
        last = deque(self._pattern.finditer(response, timeout=self._timeout_s), maxlen=1)
        return last[0] if last else None
