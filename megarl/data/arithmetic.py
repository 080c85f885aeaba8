"""Procedural data: sums of single-digit numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megarl.data.row import LabelRow, MessageRow, PreferenceRow, Row, as_messages

DEFAULT_SIZE = 4096
LARGEST_SUM = 18
ADDENDS = 4


def arithmetic_rows(seed: int, size: int) -> Iterator[Row]:
    """Yield `size` rows such as ("What is 7+5? Answer with just the number.", "12"), identical on every machine."""
    generator = random.Random(f"arithmetic {seed}")
    for number in range(1, size + 1):
        left, right = _digit(generator), _digit(generator)
        yield Row(number, f"What is {left}+{right}? Answer with just the number.", str(left + right))


def arithmetic_messages(seed: int, size: int) -> Iterator[MessageRow]:
    """Yield the rows of `arithmetic_rows` as conversations in which the assistant gives the answers."""
    for row in arithmetic_rows(seed, size):
        yield MessageRow(row.number, [*as_messages(row.prompt, "user"), *as_messages(row.answer, "assistant")])


def arithmetic_preferences(seed: int, size: int) -> Iterator[PreferenceRow]:
    """Yield the rows of `arithmetic_rows` with the answer as the chosen response and a wrong sum as the rejected
    response."""
    generator = random.Random(f"wrong arithmetic {seed}")
    for row in arithmetic_rows(seed, size):
        wrong = (int(row.answer) + 1 + int(generator.random() * LARGEST_SUM)) % (LARGEST_SUM + 1)
        yield PreferenceRow(row.number, row.prompt, row.answer, str(wrong))


def arithmetic_labels(seed: int, size: int) -> Iterator[LabelRow]:
    """Yield sums of four single-digit numbers, added from the left in three steps. On average, half of the rows contain
    one wrong step. Steps before it are labeled 1. The wrong step and later steps, which continue from the wrong total,
    are labeled 0."""
    generator = random.Random(f"labelled arithmetic {seed}")
    for number in range(1, size + 1):
        addends = [_digit(generator) for _ in range(ADDENDS)]
        # Half of the draws lie past the last step; those rows have no wrong step.
        wrong = int(generator.random() * 2 * (ADDENDS - 1))
        total, steps, labels = addends[0], [], []
        for step, addend in enumerate(addends[1:]):
            before, total = total, total + addend
            if step == wrong:
                total += 1 + int(generator.random() * LARGEST_SUM)
            steps.append(f"{before}+{addend}={total}")
            labels.append(float(step < wrong))
        question = f"What is {'+'.join(map(str, addends))}? Add up from the left, a line for each sum."
        yield LabelRow(number, question, steps, labels)


def _digit(generator: random.Random) -> int:
    """Draw a digit with random(), the only method whose sequence Python keeps stable across versions."""
    return int(generator.random() * 10)
