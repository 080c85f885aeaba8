"""Compares the last number of a response with the answer."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Digits with or without thousands separators, a decimal part, an exponent (of at most three digits: a response must
# not be able to ask for a number with a billion of them).
_UNSIGNED = (
    r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
# A sign counts where it cannot be an operator: 3-5 ends with 5, not with -5.
_NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[+\-−])?(?P<numerator>{_UNSIGNED})(?:/(?P<denominator>{_UNSIGNED}))?")


def numeric_match(prompt: str, response: str, answer: Any) -> bool:
    """Returns whether the last number in the response equals the answer, as exact rational numbers: 1/2 is 0.5, and
    0.33 is not 1/3.

    A number may have a sign, thousands separators (1,234), a decimal part (.5, 1.50), an exponent (1e-3) and a
    denominator (3/4). Whatever surrounds it ($12, 12%, 12 km) is ignored. A response without a number is wrong.

    Raises ValueError if the answer is not one such number.
    """
    expected = _NUMBER.fullmatch(str(answer).strip())
    value = None if expected is None else _value(expected)
    if value is None:
        raise ValueError(f"the answer {answer!r} is not a number; numeric_match needs one")
    found = list(_NUMBER.finditer(response))
    return bool(found) and _value(found[-1]) == value


def _value(number: re.Match[str]) -> Fraction | None:
    """Returns the number as an exact fraction, None for a denominator of zero."""
    denominator = _unsigned(number["denominator"] or "1")
    if denominator == 0:
        return None
    value = _unsigned(number["numerator"]) / denominator
    return -value if number["sign"] in ("-", "−") else value


def _unsigned(text: str) -> Fraction:
    # Decimal takes any number of digits; int refuses more than some thousands.
    return Fraction(Decimal(text.replace(",", "")))
