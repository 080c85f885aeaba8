"""Ways around the slow parts of math-verify, each with the verdict that math-verify has: numbers are compared as such,
expressions that differ in value are not simplified, and LaTeX is parsed in ANTLR's quicker mode where that suffices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

_NUMBER = re.compile(
    r"(?P<sign>-?)(?:"
    r"\\[dt]?frac\{(?P<numerator>\d{1,5})\}\{(?P<denominator>[1-9]\d{0,4})\}"
    r"|(?P<dividend>\d{1,5})/(?P<divisor>[1-9]\d{0,4})"
    r"|(?P<integer>0|[1-9]\d{0,8})"
    r")"
)
"""Numbers of so few digits that no two of them are the same to math-verify, which compares 15 digits."""

LARGEST = 1e6
"""The largest number and power in expressions that are evaluated here: rounding is far below NOTICEABLE then."""

MOST_POWER = 9

NOTICEABLE = 1e-3
"""The share of the values by which two of them differ that cannot be the same number."""

POINT = (1.3173, 0.7291, 2.1837, 1.6619)
"""The values of the variables, in the order of their names: where two expressions differ, they are not the same. No
more variables are looked at."""


def number(text: str) -> Fraction | None:
    """Returns the value of a plain integer or fraction, None for anything else, be it a number or not."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    above = found["numerator"] or found["dividend"] or found["integer"]
    below = found["denominator"] or found["divisor"] or "1"
    return Fraction(int(above), int(below)) * (-1 if found["sign"] else 1)


def differ(gold: Sequence[Any], said: Sequence[Any]) -> bool:
    """Returns whether two answers, as math-verify parses them, are certainly not the same: terms of the same variables
    that have other values at one place."""
    import sympy

    if len(gold) != 2 or len(said) != 2 or not all(_is_term(answer[0], sympy) for answer in (gold, said)):
        return False
    symbols = sorted(gold[0].free_symbols, key=str)
    if set(symbols) != said[0].free_symbols or len(symbols) > len(POINT):
        return False
    point = dict(zip(symbols, POINT, strict=False))
    try:
        first, second = _value(gold[0], point, sympy), _value(said[0], point, sympy)
    except _Unknown:
        return False
    return abs(first - second) > NOTICEABLE * max(1.0, abs(first), abs(second))


def _is_term(parsed: Any, sympy: Any) -> bool:
    return isinstance(parsed, sympy.Add | sympy.Mul | sympy.Pow)


class _Unknown(Exception):
    """An expression has a part that is not evaluated here."""


def _value(term: sympy.Basic, point: dict[sympy.Symbol, float], sympy: Any) -> float:
    """Returns the value of sums, products, and small powers of numbers and variables. Raises _Unknown for others."""
    if isinstance(term, sympy.Rational):
        value = float(term) if max(abs(term.p), term.q) <= LARGEST else math.inf
    elif isinstance(term, sympy.Symbol):
        value = point[term]
    elif isinstance(term, sympy.Add):
        value = sum(_value(part, point, sympy) for part in term.args)
    elif isinstance(term, sympy.Mul):
        value = math.prod(_value(part, point, sympy) for part in term.args)
    elif isinstance(term, sympy.Pow):
        base, power = (_value(part, point, sympy) for part in term.args)
        if abs(power) > MOST_POWER or abs(base) < NOTICEABLE or (base < 0 and power != int(power)):
            raise _Unknown
        value = base**power
    else:
        raise _Unknown
    if not abs(value) <= LARGEST:
        raise _Unknown
    return value


def parse_quickly() -> None:
    """Makes the parser of LaTeX below math-verify use ANTLR's SLL mode. Where that finds a tree it is the one of the
    full mode, which does not keep what it has worked out: https://www.antlr.org/papers/allstar-techreport.pdf. Where
    it finds none, the full mode has its turn."""
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended import latex2sympy2

    class TwoStageParser(latex2sympy2.PSParser):
        is_two_stage = True

        def math(self) -> Any:
            self._interp.predictionMode = PredictionMode.SLL
            try:
                return super().math()
            except Exception:  # the parser's errors have no class of their own
                self.reset()
                self._interp.predictionMode = PredictionMode.LL
                return super().math()

    if not hasattr(latex2sympy2.PSParser, "is_two_stage"):
        latex2sympy2.PSParser = TwoStageParser
