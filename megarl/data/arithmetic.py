"""Procedural prompts: additions of two single-digit numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megarl.data.row import Row


def arithmetic_rows(seed: int, size: int) -> Iterator[Row]:
    """`size` rows like ("What is 7+5? Answer with just the number.", "12"), the same on every machine."""
    generator = random.Random(f"arithmetic {seed}")
    for number in range(1, size + 1):
        left, right = _digit(generator), _digit(generator)
        yield Row(number, f"What is {left}+{right}? Answer with just the number.", str(left + right))


def _digit(generator: random.Random) -> int:
    """By way of random(), the only method whose values Python keeps over its versions."""
    return int(generator.random() * 10)
