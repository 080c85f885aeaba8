"""A calculator with two tools, and questions that need both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megarl.environments.protocol import Environment, Task, Turn
from megarl.environments.tools import Message, tool
from megarl.rewards.numeric import numeric_match


class CalculatorEnvironment(Environment):
    """Asks for the value of `a * b + c` or `(a + b) * c`, or what a row of the data asks, and gives tools that add and
    multiply. The turn that calls none is the answer: 1 if its last number is right, else 0."""

    def __init__(self, low: int = 2, high: int = 99):
        """low, high: the least and the greatest number in a question that is made from the seed."""
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
        """Return whether the turn is the right answer. The last turn that a rollout may have is none if it calls."""
        return float(not turn.tool_calls and numeric_match("", turn.text, self.answer))
