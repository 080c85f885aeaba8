"""Arithmetic questions that need two calculator tools."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megarl.environments.protocol import Environment, Task, Turn
from megarl.environments.tools import Message, tool
from megarl.rewards.numeric import expected_number, numeric_match


class CalculatorEnvironment(Environment):
    """Arithmetic with the tools `add` and `multiply`. The question is the data row's prompt. If there is no prompt, it
    is `a * b + c` or `(a + b) * c`, with numbers generated from the seed. The first turn without a tool call is the
    answer. The reward is 1 if the answer's last number is correct, else 0."""

    check_answer = staticmethod(expected_number)

    def __init__(self, low: int = 2, high: int = 99):
        """
        Args:
            low: smallest number in a generated question.
            high: largest number in a generated question.
        """
        self.low, self.high = low, high
        self.answer: object = None

    async def reset(self, task: Task) -> Sequence[Message] | None:
        if task.messages:
            self.answer = task.answer
            return None
        question, self.answer = self._question(Random(task.seed))
        return [{"role": "user", "content": question}]

    def _question(self, random: Random) -> tuple[str, str]:
        a, b, c = (random.randint(self.low, self.high) for _ in range(3))
        if random.random() < 0.5:
            return f"What is {a} * {b} + {c}?", str(a * b + c)
        return f"What is ({a} + {b}) * {c}?", str((a + b) * c)

    @tool
    async def add(self, a: int, b: int) -> int:
        """Returns the sum of two numbers.

        a: the first number
        b: the second number
        """
        return a + b

    @tool
    async def multiply(self, a: int, b: int) -> int:
        """Returns the product of two numbers.

        a: the first number
        b: the second number
        """
        return a * b

    async def reward(self, turn: Turn) -> float:
        """Return 1 if the turn is the correct answer, else 0. A last turn that still calls a tool is not an answer."""
        return float(not turn.tool_calls and numeric_match("", turn.text, self.answer))
