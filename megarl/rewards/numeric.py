"""Compares the last number in a response with the answer."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from megarl.rewards.options import checks_rows

# Digits with optional thousands separators, decimal part and exponent. The exponent is limited to three digits,
# because a response such as 1e1000000000 would otherwise create a number with a billion digits.
_UNSIGNED = (
    r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
# A sign counts only where it cannot be a binary operator: 3-5 ends with 5, not with -5.
_NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[+\-−])?(?P<numerator>{_UNSIGNED})(?:/(?P<denominator>{_UNSIGNED}))?")


MAX_CHARACTERS = 10_000
"""Maximum length of a number in characters. The conversion takes time quadratic in the length."""


def expected_number(answer: Any) -> Fraction:
    """Parse the answer as an exact fraction. Raise ValueError if it is not a number in the format of
    `numeric_match`."""
    expected = _NUMBER.fullmatch(str(answer).strip())
    value = None if expected is None else _value(expected)
    if value is None:
        raise ValueError(f"numeric_match: the answer {answer!r} is not a number. Fix: use exact_match for text answers")
    return value


@checks_rows(expected_number)
def numeric_match(prompt: str, response: str, answer: Any) -> bool:
    """Return whether the last number in the response equals the answer as an exact rational: 1/2 = 0.5, but 0.33 ≠ 1/3.
    A number may have a sign, thousands separators (1,234), a decimal part (.5, 1.50), an exponent (1e-3) and a
    denominator (3/4). Surrounding text ($12, 12%, 12 km) is ignored. A response without a number counts as wrong. Raise
    ValueError if the answer is not a number in this format."""
    value = expected_number(answer)
    numbers = list(_NUMBER.finditer(response))
    return bool(numbers) and len(numbers[-1][0]) <= MAX_CHARACTERS and _value(numbers[-1]) == value


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the number as an exact fraction, or None if its denominator is zero."""
    denominator = _unsigned(number["denominator"] or "1")
    if denominator == 0:
        return None
    value = _unsigned(number["numerator"]) / denominator
    return -value if number["sign"] in ("-", "−") else value


def _unsigned(text: str) -> Fraction:
    # Use Decimal, because int rejects more than a few thousand digits.
    return Fraction(Decimal(text.replace(",", "")))
