"""Compares the final mathematical expression of a response with the answer, using math-verify."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from megarl.rewards.math_shortcuts import differ, number, parse_quickly

_WRAPPED = re.compile(r"\$+(?P<inner>[^$]*)\$+|\\\((?P<paren>.*)\\\)|\\\[(?P<bracket>.*)\\\]", re.DOTALL)
_BOXED = "\\boxed{"

MOST_BETWEEN = 16
"""Maximum number of characters between adjacent boxes, such as " and ". math-verify may join them to one answer."""


class MathMatch:
    """Reward function that returns whether the response's final expression equals the answer.

    Expressions may be numbers, fractions, roots, sets, intervals, matrices or equations, in LaTeX or plain text. If the
    response has boxes (`\\boxed{…}`), the last one counts, together with boxes adjacent to it. Otherwise the expression
    after "the answer is" counts, or the last expression.

    Based on https://github.com/huggingface/Math-Verify. A response that it cannot parse is wrong. An answer that it
    cannot parse is a failure, and so is a comparison that raises or takes longer than timeout_s. The timeout uses a
    signal, which only a process's main thread can receive; other threads have no timeout.
    """

    def __init__(self, timeout_s: int = 5, digits: int = 6, last_characters: int = 4000):
        """Create the function with its options.

        Args:
            timeout_s: timeout for parsing the response and for one comparison, in whole seconds.
            digits: decimal places to which floating-point numbers are compared.
            last_characters: number of characters at the end of the response to search.
        """
        for name, value in (("timeout_s", timeout_s), ("digits", digits), ("last_characters", last_characters)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"options.{name}={value!r}: must be a positive integer. Fix: change it to one")
        import math_verify  # takes nearly a second, which must not count toward the first call's timeout

        parse_quickly()
        self._verify, self._parse = math_verify.verify, math_verify.parse
        self._timeout_s, self._digits, self._last_characters = timeout_s, digits, last_characters
        # Many samples of a prompt have the same final answer.
        self._gold = lru_cache(maxsize=1024)(self._parsed_answer)
        self._equal = lru_cache(maxsize=8192)(self._compare)

    def __call__(self, prompt: str, response: str, answer: Any) -> bool:
        expected, end = str(answer).strip(), response[-self._last_characters :]
        boxes, bare = _last_boxes(end), _bare(expected)
        boxed = end[boxes[-1]].removeprefix(_BOXED)[:-1].strip() if boxes else None
        gold_number, boxed_number = number(bare), None if boxed is None or len(boxes) > 1 else number(boxed)
        if gold_number is not None and boxed_number is not None:
            return gold_number == boxed_number
        self._gold(expected)  # raises if the answer cannot be parsed, regardless of the response
        if boxed == bare:
            return True
        return self._equal(end[boxes[0].start : boxes[-1].stop] if boxes else end, expected)

    def _compare(self, response: str, answer: str) -> bool:
        gold, parsed = self._gold(answer), self._parsed(response)
        return not differ(gold, parsed) and self._verify(
            gold, parsed, float_rounding=self._digits, timeout_seconds=self._limit(), raise_on_error=True
        )

    def _parsed_answer(self, answer: str) -> list[Any]:
        """Parse the answer. Raise ValueError if it has no expression."""
        parsed = self._parsed(f"\\boxed{{{_bare(answer)}}}")
        if answer == "None" or not parsed:
            raise ValueError(
                f"math_match: the answer {answer!r} is not a mathematical expression. Fix: use exact_match"
            )
        return parsed

    def _parsed(self, text: str) -> list[Any]:
        limit: Any = self._limit()  # math-verify accepts None, but declares int
        return self._parse(text, parsing_timeout=limit, raise_on_error=True)

    def _limit(self) -> int | None:
        return self._timeout_s if threading.current_thread() is threading.main_thread() else None


def _bare(answer: str) -> str:
    """Return the answer without its LaTeX wrapper: dollar signs, brackets or a box."""
    if (wrapped := _WRAPPED.fullmatch(answer)) is not None:
        answer = next(part for part in wrapped.groups() if part is not None).strip()
    boxes = _last_boxes(answer)
    whole = slice(0, len(answer))
    return answer[len(_BOXED) : -1].strip() if boxes == [whole] else answer


def _last_boxes(text: str) -> list[slice]:
    """Return the spans of the last closed box and of the boxes directly before it, in order."""
    boxes: list[slice] = []
    start = text.rfind(_BOXED)
    while start >= 0 and (stop := _end_of_box(text, start)) is not None:
        if boxes and boxes[0].start - stop > MOST_BETWEEN:
            break
        boxes.insert(0, slice(start, stop))
        start = text.rfind(_BOXED, 0, start)
    return boxes


def _end_of_box(text: str, start: int) -> int | None:
    depth = 0
    for i in range(start + len(_BOXED) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return None
