"""Divisors, and the line of a rule for a number that is none."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def does_not_divide(key: str, divisor: int, what: str, number: int, legal: Iterable[int]) -> str | None:
    if number % divisor == 0:
        return None
    arithmetic = f"{number} / {divisor} = {number / divisor:.4g}"
    choices = ", ".join(str(value) for value in legal)
    return f"{key}={divisor}: {number} {what} do not divide by {divisor} ({arithmetic}); choose from {choices}"
