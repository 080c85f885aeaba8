"""Divisors, and error messages for sizes that must divide a number."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def divisibility_error(key: str, divisor: int, noun: str, number: int, legal: Iterable[int]) -> str | None:
    """Return an error message unless `divisor`, the value of `key`, divides `number`.

    Args:
        noun: the items that `number` counts.
        legal: values of `key` that the message suggests.
    """
    if number % divisor == 0:
        return None
    arithmetic = quotient(number, divisor)
    return (
        f"{key}={divisor}: {number} {noun} are not divisible by {divisor} ({arithmetic}). Fix: set {key} to "
        f"{listed(legal)}"
    )


def quotient(number: int, divisor: int) -> str:
    return f"{number} / {divisor} = {number / divisor:.4g}"


def listed(numbers: Iterable[int]) -> str:
    """Return the numbers as text, such as "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
