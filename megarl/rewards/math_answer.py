"""Compares the final mathematical expression of a response with the answer, using math-verify."""

from __future__ import annotations

import math
import re
import threading
import unicodedata
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from megarl.rewards.forked import in_child
from megarl.rewards.math_shortcuts import compare_relatively, decimal, differ, is_close, number, parse_quickly
from megarl.usercode.failures import ProcessLost

_WRAPPED = re.compile(r"\$+(?P<inner>[^$]*)\$+|\\\((?P<paren>.*)\\\)|\\\[(?P<bracket>.*)\\\]", re.DOTALL)
_BOXED = "\\boxed{"

_RISKY = re.compile(
    r"[!^].*[!^]|[0-9]{3,}\s*!|\^\s*\{?\s*[+-]?\s*[0-9]{4,}|[0-9]{300,}|"
    r"\\(?:binom|sum|prod|int|exp|ln|log|sin|cos|tan|sinh|cosh|tanh|arc|lim|mod|pmod|operatorname)",
    re.DOTALL,
)
"""Expressions whose evaluation may run forever in code that signals cannot interrupt, or exhaust stack or memory."""

DEEPEST = 20
"""Maximum bracket nesting depth of expressions that are evaluated in this process."""

MINUS = "\N{MINUS SIGN}"

_SYMBOLS = str.maketrans({"\N{FRACTION SLASH}": "/", "∞": "\\infty ", "·": "\\cdot "})

_UNICODE = re.compile(
    r"(?P<whole>[0-9]{0,5})(?P<fraction>[¼-¾⅐-⅞])|(?P<power>[⁺⁻]?[⁰¹²³⁴-⁹]+)|√(?P<radicand>[0-9]+|[a-z])"
)
"""A fraction, a power or a root in Unicode, which math-verify cannot parse."""

_EULER = re.compile(r"[+-]?[0-9]+e[+-]?[1-9]")
"""Text in which `e` more likely means Euler's number than an exponent."""

_E_NOTATION = re.compile(r"(?<![\w.])(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,2}(?!\w|\.[0-9])", re.ASCII)

_SPACED = re.compile(
    r"(?<![\w.,])[0-9]{1,3}(?:(?:,?\\!|\{,\}|\\[,:;]|[~\u00a0\u2009\u202f])[0-9]{3})+(?![0-9])", re.ASCII
)
"""A number with thin spaces or `{,}` between groups of three digits. math-verify reads it as a product or a list."""

_TEXT_NUMBER = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\{\s*"
    r"(?P<number>[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|[0-9]+\s+[0-9]+/[0-9]+)\s*\}"
)
"""A number in text mode, which math-verify ignores."""

_MIXED = r"(?P<sign>[+-]?)(?P<whole>[1-9][0-9]{0,4})\s+(?P<numerator>[1-9][0-9]{0,4})/(?P<denominator>[1-9][0-9]{0,4})"
_MIXED_NUMBER = re.compile(_MIXED)
_BOXED_MIXED_NUMBER = re.compile(rf"(?<=\\boxed\{{)\s*{_MIXED}(?=\s*(?:\\text\{{[^{{}}]*\}}\s*)?\}})")

MAX_BOX_GAP = 16
"""Maximum number of characters between adjacent boxes, such as " and ". math-verify may combine such boxes into one
answer."""


MAX_SHOWN = 200
"""Maximum number of characters of an answer that an error message shows."""


class NotExpression(ValueError):
    """Raised for an answer without an expression."""


class MathMatch:
    """Reward function that returns whether the response's final expression equals the answer.

    Expressions may be numbers, fractions, roots, sets, intervals, matrices or equations, in LaTeX or plain text. If the
    response has boxes (`\\boxed{…}`), the last one counts, together with boxes adjacent to it. Otherwise the expression
    after "the answer is" counts, or the last expression.

    Numbers are equal if their relative difference is small; integers and fractions are compared exactly. If the answer
    is a number, 1e-05 in the response is read as a number, not as a term with Euler's number.

    Expressions are parsed and compared with math-verify (https://github.com/huggingface/Math-Verify). A response that
    cannot be parsed and compared within timeout_s counts as wrong. An answer that cannot be parsed, or cannot be
    compared with itself, counts as a failure. Expressions that may be expensive are evaluated in a forked process that
    can be killed. For others, the timeout uses a signal, which only a process's main thread can receive.
    """

    def __init__(self, timeout_s: int = 5, digits: int = 6, last_characters: int = 4000):
        """Create the function with its options.

        Args:
            timeout_s: timeout for parsing the response and for one comparison, in whole seconds.
            digits: significant digits to which decimal numbers are compared (decimal places for numbers above 1).
            last_characters: number of characters at the end of the response to search.
        """
        for name, value in (("timeout_s", timeout_s), ("digits", digits), ("last_characters", last_characters)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"options.{name}={value!r}: must be a positive integer. Fix: use 1 or more")
        import math_verify  # takes a second, which must not count toward the timeout of the first call
        from math_verify.errors import TimeoutException

        parse_quickly()
        compare_relatively()

        self._errors = Exception, TimeoutException
        self._verify, self._parse = math_verify.verify, math_verify.parse
        self._timeout_s, self._digits, self._last_characters = timeout_s, digits, last_characters
        # Cache, because many samples of a prompt have the same final answer.
        self._gold = lru_cache(maxsize=1024)(self._parsed_answer)
        self._equal = lru_cache(maxsize=8192)(self._compare)

    def __call__(self, prompt: str, response: str, answer: Any) -> bool:
        expected, end = _expected(answer), _normalized(response[-self._last_characters :])
        end = _BOXED_MIXED_NUMBER.sub(_improper, end)
        boxes, bare = _last_boxes(end), _bare(expected)
        boxed = end[boxes[-1]].removeprefix(_BOXED)[:-1].strip() if boxes else None
        gold_number, boxed_number = number(bare), None if boxed is None or len(boxes) > 1 else number(boxed)
        if gold_number is not None and boxed_number is not None:
            return gold_number == boxed_number
        gold_value = None if isinstance(answer, str) and _EULER.fullmatch(bare) else decimal(bare)
        if gold_value is not None:
            if boxed is not None and len(boxes) == 1 and (value := decimal(boxed)) is not None:
                return is_close(gold_value, value, self._digits)
            end = _E_NOTATION.sub(lambda match: f"{Decimal(match[0]):f}", end)
            boxes = _last_boxes(end)
        else:
            self._gold(expected)  # raises if the answer cannot be parsed, regardless of the response
        if boxed == bare:
            return True
        return self._equal(end[boxes[0].start : boxes[-1].stop] if boxes else end, expected)

    def check_row(self, answer: Any) -> None:
        """Raise ValueError if the answer cannot be parsed, or cannot be compared with itself."""
        expected = _expected(answer)
        if decimal(_bare(expected)) is not None:
            return

        def compare() -> bool:
            gold = self._parsed_answer(expected)
            return self._verify_parsed(gold, gold)

        try:
            in_child(compare, 2 * self._timeout_s) if _is_risky(expected) else compare()
        except (NotExpression, ProcessLost):
            raise
        except self._errors as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"math_match: math-verify cannot compare the answer {expected[:MAX_SHOWN]!r} ({reason}). Fix: "
                "simplify the answer, or use exact_match"
            ) from None

    def _compare(self, response: str, answer: str) -> bool:
        gold = self._gold(answer)
        compare = partial(self._is_same, gold, response)
        try:
            return bool(in_child(compare, self._timeout_s)) if _is_risky(response) else compare()
        except ProcessLost:
            raise
        except self._errors:
            self._verify_parsed(gold, gold)  # raises if the failure does not depend on the response
            return False

    def _is_same(self, gold: list[Any], text: str) -> bool:
        response = self._parsed(text)
        return not differ(gold, response) and self._verify_parsed(gold, response)

    def _verify_parsed(self, gold: list[Any], response: list[Any]) -> bool:
        return self._verify(
            gold, response, float_rounding=self._digits, timeout_seconds=self._limit(), raise_on_error=True
        )

    def _parsed_answer(self, answer: str) -> list[Any]:
        """Parse the answer. Raise NotExpression if it has no expression."""
        parsed = self._parsed(f"\\boxed{{{_bare(answer)}}}")
        if answer == "None" or not parsed:
            raise NotExpression(
                f"math_match: the answer {answer[:MAX_SHOWN]!r} is not a mathematical expression. Fix: use exact_match"
            )
        return parsed

    def _parsed(self, text: str) -> list[Any]:
        limit: Any = self._limit()  # declared as int, but None is allowed
        return self._parse(text, parsing_timeout=limit, raise_on_error=True)

    def _limit(self) -> int | None:
        return self._timeout_s if threading.current_thread() is threading.main_thread() else None


def _text(answer: Any) -> str:
    """Return the answer as text. A float is written as a decimal number without an exponent."""
    if isinstance(answer, float) and math.isfinite(answer):
        return f"{Decimal(repr(answer)):f}"
    return str(answer).strip()


def _expected(answer: Any) -> str:
    """Return the answer in a notation that math-verify reads correctly."""
    text = _normalized(_text(answer))
    mixed = _MIXED_NUMBER.fullmatch(_bare(text))
    return text if mixed is None else _improper(mixed)


def _normalized(text: str) -> str:
    text = _UNICODE.sub(_as_latex, text.translate(_SYMBOLS)).replace("\\varnothing", "\\emptyset")
    text = _TEXT_NUMBER.sub(lambda match: match["number"], text)
    return _SPACED.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)


def _as_latex(match: re.Match[str]) -> str:
    """Convert Unicode text such as ½, √2 or ² to a notation that math-verify can parse."""
    if match["fraction"] is not None:
        numerator, denominator = unicodedata.normalize("NFKC", match["fraction"]).split("\u2044")
        whole = match["whole"] or ""
        return f"{whole} {numerator}/{denominator}" if whole else f"\\frac{{{numerator}}}{{{denominator}}}"
    if match["power"] is not None:
        return f"^{{{unicodedata.normalize('NFKC', match['power']).replace(MINUS, '-')}}}"
    return f"\\sqrt{{{match['radicand']}}}"


def _improper(mixed: re.Match[str]) -> str:
    """Return a mixed number such as 1 1/2 as a fraction. Text such as 1 3/2 stays unchanged."""
    whole, numerator, denominator = (int(mixed[name]) for name in ("whole", "numerator", "denominator"))
    if numerator >= denominator:
        return mixed[0]
    sign = mixed["sign"].removeprefix("+")
    return f"{sign}\\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _is_risky(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest > DEEPEST or _RISKY.search(text) is not None


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
        if boxes and boxes[0].start - stop > MAX_BOX_GAP:
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
