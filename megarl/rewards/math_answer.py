"""Compares the mathematical expression that a response settles on with the answer, by the package math-verify."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from megarl.rewards.math_shortcuts import differ, number, parse_quickly

_WRAPPED = re.compile(r"\$+(?P<inner>[^$]*)\$+|\\\((?P<paren>.*)\\\)|\\\[(?P<bracket>.*)\\\]", re.DOTALL)
_BOXED = "\\boxed{"

MOST_BETWEEN = 16
"""The characters that may be between boxes that stand side by side, such as "$, $" and "$ and $". Whether they are one
answer is for math-verify to say."""


class MathMatch:
    """Whether the response's last expression equals the answer: numbers, fractions, roots, sets, intervals, matrices,
    equations, in LaTeX or in plain text. If the response has boxes (`\\boxed{…}`), only the last one counts, or the
    last ones that stand side by side; else what comes after "the answer is", or the last expression.

    By https://github.com/huggingface/Math-Verify. What it cannot read in a response is wrong; what raises or takes
    longer than timeout_s while it compares is a failure, and so is an answer that it cannot read. Its clock is a
    signal, which only a process's main thread can have; in other threads there is none.
    """

    def __init__(self, timeout_s: int = 5, digits: int = 6, last_characters: int = 4000):
        """timeout_s: of reading the response, and of one comparison, in whole seconds. digits: decimal places to which
        floating-point numbers are compared. last_characters: the end of the response in which it is looked for."""
        for name, value in (("timeout_s", timeout_s), ("digits", digits), ("last_characters", last_characters)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"options.{name}={value!r} is not an integer above 0")
        import math_verify  # takes most of a second, which the first call would not have

        parse_quickly()
        self._verify, self._parse = math_verify.verify, math_verify.parse
        self._timeout_s, self._digits, self._last_characters = timeout_s, digits, last_characters
        # Many samples of a prompt end with the same answer.
        self._gold = lru_cache(maxsize=1024)(self._parsed_answer)
        self._equal = lru_cache(maxsize=8192)(self._compare)

    def __call__(self, prompt: str, response: str, answer: Any) -> bool:
        expected, end = str(answer).strip(), response[-self._last_characters :]
        boxes, bare = _last_boxes(end), _bare(expected)
        said = end[boxes[-1]].removeprefix(_BOXED)[:-1].strip() if boxes else None
        gold_number, said_number = number(bare), number(said) if len(boxes) == 1 else None
        if gold_number is not None and said_number is not None:
            return gold_number == said_number
        self._gold(expected)  # raises for an answer that cannot be read, whatever the response is
        if said == bare:
            return True
        return self._equal(end[boxes[0].start : boxes[-1].stop] if boxes else end, expected)

    def _compare(self, said: str, answer: str) -> bool:
        gold, parsed = self._gold(answer), self._parsed(said)
        return not differ(gold, parsed) and self._verify(
            gold,
            parsed,
            float_rounding=self._digits,
            timeout_seconds=self._limit(),
            raise_on_error=True,
        )

    def _parsed_answer(self, answer: str) -> list[Any]:
        """Raises ValueError for an answer without an expression."""
        parsed = self._parsed(f"\\boxed{{{_bare(answer)}}}")
        if answer == "None" or not parsed:
            raise ValueError(f"the answer {answer!r} is no mathematical expression; math_match needs one")
        return parsed

    def _parsed(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=self._limit(), raise_on_error=True)

    def _limit(self) -> int | None:
        return self._timeout_s if threading.current_thread() is threading.main_thread() else None


def _bare(answer: str) -> str:
    """Returns the answer without what makes it LaTeX: dollars, brackets, a box."""
    if (wrapped := _WRAPPED.fullmatch(answer)) is not None:
        answer = next(part for part in wrapped.groups() if part is not None).strip()
    boxes = _last_boxes(answer)
    whole = slice(0, len(answer))
    return answer[len(_BOXED) : -1].strip() if boxes == [whole] else answer


def _last_boxes(text: str) -> list[slice]:
    """Returns where the last closed box is, after those that stand side by side with it."""
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
