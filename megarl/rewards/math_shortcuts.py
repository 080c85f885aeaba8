"""Shortcuts around slow parts of math-verify that yield the same verdicts.

Plain numbers are compared directly, expressions that differ in value are not simplified, and LaTeX is parsed in ANTLR's
faster mode where it suffices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(
    r"(?P<sign>-?)(?:"
    r"\\[dt]?frac\{(?P<numerator>[0-9]{1,5})\}\{(?P<denominator>[1-9][0-9]{0,4})\}"
    r"|(?P<dividend>[0-9]{1,5})/(?P<divisor>[1-9][0-9]{0,4})"
    r"|(?P<integer>0|[1-9][0-9]{0,8})"
    r")"
)
"""Matches numbers short enough that math-verify, which compares 15 digits, never considers two different ones equal."""

_TEN = r"10\s*\^\s*(?:\{\s*(?P<NAME>[+-]?[0-9]{1,4})\s*\}|(?P<NAME_digit>[0-9]))"
_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<digits>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,4})|\s*\\(?:times|cdot)\s*"
    + _TEN.replace("NAME", "power")
    + ")?|"
    + _TEN.replace("NAME", "bare")
    + ")"
)

LARGEST = 1e6
"""Largest absolute value in evaluated expressions. Up to this value, rounding errors are far below NOTICEABLE."""

MAX_POWER = 9

NOTICEABLE = 1e-3
"""Relative difference above which two values cannot be the same number."""

POINT = (1.3173, 0.7291, 2.1837, 1.6619)
"""Values substituted for the variables, in order of their names. Expressions that differ at this point are not equal.
Expressions with more variables are not evaluated."""


def number(text: str) -> Fraction | None:
    """Return the value of a plain integer or fraction. Return None for any other text, even if it is a number."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    numerator = match["numerator"] or match["dividend"] or match["integer"]
    denominator = match["denominator"] or match["divisor"] or "1"
    return Fraction(int(numerator), int(denominator)) * (-1 if match["sign"] else 1)


def decimal(text: str) -> Fraction | None:
    """Return the value of a plain number, or of a decimal number such as 0.5, 1e-05, `1.5 \\times 10^{-5}` or
    `10^{-5}`. Return None for any other text."""
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return number(text)
    names = ("exponent", "power", "power_digit", "bare", "bare_digit")
    power = next((match[name] for name in names if match[name] is not None), "0")
    return Fraction(Decimal(match["sign"] + (match["digits"] or "1"))) * Fraction(10) ** int(power)


def is_close(first: Fraction, second: Fraction, digits: int) -> bool:
    """Return whether two numbers agree to `digits` decimal places, or significant digits if they are below 1."""
    return abs(first - second) <= Fraction(1, 10**digits) * min(1, max(abs(first), abs(second)))


def differ(gold: Sequence[Any], response: Sequence[Any]) -> bool:
    """Return whether two answers parsed by math-verify certainly differ: they have the same variables, but different
    values at POINT."""
    import sympy

    terms = (sympy.Add, sympy.Mul, sympy.Pow)
    if not all(len(answer) == 2 and isinstance(answer[0], terms) for answer in (gold, response)):
        return False
    symbols = sorted(gold[0].free_symbols, key=str)
    if set(symbols) != response[0].free_symbols or len(symbols) > len(POINT):
        return False
    point = dict(zip(symbols, POINT, strict=False))
    try:
        first, second = _value(gold[0], point, sympy), _value(response[0], point, sympy)
    except _Unknown:
        return False
    return abs(first - second) > NOTICEABLE * max(1.0, abs(first), abs(second))


class _Unknown(Exception):
    """Raised for an expression with a part that cannot be evaluated here."""


def _value(term: Any, point: dict[Any, float], sympy: Any) -> float:
    """Evaluate sums, products and small powers of numbers and variables. Raise _Unknown for anything else."""
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
        if abs(power) > MAX_POWER or abs(base) < NOTICEABLE or (base < 0 and power != int(power)):
            raise _Unknown
        value = base**power
    else:
        raise _Unknown
    if not abs(value) <= LARGEST:
        raise _Unknown
    return value


def compare_relatively() -> None:
    """Make math-verify compare numbers by their relative difference. By default, it rounds to decimal places, which
    makes all numbers near 0 equal."""
    import sympy
    from math_verify import grader

    def is_equal(a: Any, b: Any, digits: int, precision: int) -> bool:
        matrices = sympy.MatrixBase, sympy.MatrixExpr
        if isinstance(a, matrices) or isinstance(b, matrices):
            return original(a, b, digits, precision)
        has_float = a.has(sympy.Float) or b.has(sympy.Float)
        if not has_float and any(grader.is_atomic_or_pct_atomic(term, sympy.Number) for term in (a, b)):
            return original(a, b, digits, precision)
        symbols = sorted(a.free_symbols | b.free_symbols, key=str)
        if symbols and (len(symbols) > len(POINT) or not original(a, b, digits, precision)):
            return False
        point = dict(zip(symbols, POINT, strict=False))
        try:
            first, second = (term.doit().subs(point).evalf(precision + 5) for term in (a, b))
            if not (first.is_finite and second.is_finite):
                return first == second
            scale = max(abs(first), abs(second))
            tolerance = min(1, scale) * sympy.Rational(1, 10**digits) if has_float else scale * 10.0**-precision
            return bool(abs(first - second) <= tolerance)
        except (TypeError, ValueError, AttributeError):  # not comparable as numbers
            return False

    original = grader.sympy_numeric_eq
    if not hasattr(original, "is_relative"):
        is_equal.is_relative = True  # pyright: ignore[reportFunctionMemberAccess]
        grader.sympy_numeric_eq = is_equal


def parse_quickly() -> None:
    """Make math-verify's LaTeX parser try ANTLR's SLL mode first, and full LL mode if that fails. A parse tree found in
    SLL mode equals the tree from LL mode. LL mode is slower because it does not cache its decisions:
    https://www.antlr.org/papers/allstar-techreport.pdf."""
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended import latex2sympy2

    class TwoStageParser(latex2sympy2.PSParser):
        is_two_stage = True

        def math(self) -> Any:
            self._interp.predictionMode = PredictionMode.SLL
            try:
                return super().math()
            except Exception:  # the parser's exceptions have no common base class
                self.reset()
                self._interp.predictionMode = PredictionMode.LL
                return super().math()

    if not hasattr(latex2sympy2.PSParser, "is_two_stage"):
        latex2sympy2.PSParser = TwoStageParser
