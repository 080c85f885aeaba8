"""The environment of tasks that end with the first response, which reward functions judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.core.types import Prompt
from megarl.environments.pool import FunctionPool
from megarl.environments.protocol import Step, Turn


class SingleTurn:
    """A prompt and one response. Its Step has the results of all functions, which are called side by side."""

    def __init__(self, pool: FunctionPool, functions: Sequence[str]):
        """functions: names as in rewards.functions, f(prompt, response, answer), and columns of the prompt's row."""
        self._pool, self._functions = pool, functions

    async def reset(self, prompt: Prompt) -> Prompt:
        self._prompt = prompt
        return prompt

    async def step(self, turn: Turn) -> Step:
        prompt = self._prompt
        calls = [
            asyncio.wrap_future(self._pool.call(name, prompt.text, turn.text, prompt.answer, columns=prompt.columns))
            for name in self._functions
        ]
        return Step(dict(zip(self._functions, await asyncio.gather(*calls), strict=True)))
