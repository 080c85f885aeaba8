"""Environments for tests of environment processes."""

import asyncio
import itertools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from megarl.environments import Environment, Opening, Reward, Step, Task, Turn, tool

LOOK = [{"role": "user", "content": "look at it " * 400_000}]
ENORMOUS = [{"role": "user", "content": " " * 2**26}] * 4
LONG = {"long": LOOK, "long restart": LOOK, "long as is": LOOK, "enormous": ENORMOUS}
"""Fault -> observation that is much longer than the context."""


class Counter(Environment):
    """Counts turns. The first message of the task selects a fault, which happens in the second turn."""

    def __init__(self, end: int = 3):
        if end < 0:
            raise ValueError("end < 0")
        self._end, self._fault, self.num_turns = end, "", 0

    async def reset(self, task: Task) -> Opening | list[dict] | None:
        self._fault = task.messages[0]["content"]
        print("printed by an environment", flush=True)
        if self._fault == "other":
            return [{"role": "user", "content": f"begin {task.answer} {task.columns['level']} {task.seed}"}]
        if self._fault == "long opening":
            return LONG["long"]
        if self._fault == "answered":
            return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        return Opening(token_ids=[7, 8, 9]) if self._fault == "ids" else None

    async def step(self, turn: Turn) -> Step:
        self.num_turns += 1
        if self.num_turns == 2:
            await self._fail()
        reward = {"even": float(len(turn.token_ids) % 2 == 0)}
        if self.num_turns == self._end:
            return Step(reward={"reward": reward, "feedback": f"end of {self._fault}"}, done=True)
        if self._fault == "restart" and self.num_turns == 1:
            return Step([{"role": "user", "content": "restarted"}], restart=True)
        if self._fault == "answers":
            return Step([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        if self._fault in LONG:
            return Step(LONG[self._fault], restart=self._fault == "long restart", as_is=self._fault == "long as is")
        if self._fault == "deep":
            return Step([{"role": "user", "content": json.loads('{"a": ' * 400 + "1" + "}" * 400)}])
        if self._fault == "half":
            return Step("\ud83d turns", reward)
        if self._fault == "feedback":
            reward = {"reward": reward, "feedback": f"turn {self.num_turns}"}
        return Step(f"{self.num_turns} turns", reward, as_is=self._fault == "as is")

    async def _fail(self) -> None:
        if self._fault == "raise":
            raise KeyError("broken world")
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "hang":
            await asyncio.sleep(600)
        if self._fault == "block":
            time.sleep(600)


class Killed(Counter):
    """Kills its process, or sends it another signal, in the second turn unless the file `flag` exists. Creates the file
    first."""

    def __init__(self, flag: str | None = None, number: int = signal.SIGKILL):
        super().__init__()
        self._flag, self._number = None if flag is None else Path(flag), number

    async def step(self, turn: Turn) -> Step:
        if turn.number == 1 and (self._flag is None or not self._flag.exists()):
            if self._flag is not None:
                self._flag.touch()
            os.kill(os.getpid(), self._number)
        return await super().step(turn)


class Mixed(Counter):
    """Counts turns. In the second turn, it may also kill its process or allocate too much memory."""

    async def _fail(self) -> None:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "allocate":
            bytearray(2**34)
        await super()._fail()


class Refused(Counter):
    """Calls a server that refuses the first connections. The file `flag` counts the connections."""

    def __init__(self, flag: str, num_refusals: int):
        super().__init__()
        self._flag, self._num_refusals = Path(flag), num_refusals

    async def step(self, turn: Turn) -> Step:
        if self.num_turns == 1:
            with self._flag.open("a") as calls:
                calls.write(".")
            if self._flag.stat().st_size <= self._num_refusals:
                try:
                    raise ConnectionRefusedError("no server")
                except ConnectionRefusedError as error:
                    raise RuntimeError("the library's own error") from error
        return await super().step(turn)


class Nothing(Environment):
    """Returns neither an observation nor done=True."""

    async def step(self, turn: Turn) -> None:
        return Step() if turn.number == 0 else None


class Keyed(Counter):
    """Names its states by the number of turns left. With the fault `number`, a key is not a string."""

    async def reset(self, task: Task) -> Opening:
        await super().reset(task)
        return Opening(task.messages, state="3 left")

    async def step(self, turn: Turn) -> Step:
        step, left = await super().step(turn), 3 - self.num_turns
        return replace(step, state=left if self._fault == "number" else f"{left} left")


class Tools(Environment):
    @tool
    def double(self, number: int) -> int:
        """Doubles a number."""
        return 2 * number

    @tool
    def block(self) -> str:
        """Never returns."""
        time.sleep(600)

    async def reward(self, turn: Turn) -> Reward:
        return {"reward": float(turn.text == "8"), "feedback": None}


PLAYED = itertools.count(1)


class Numbered(Environment):
    """Rewards a rollout with its ordinal number within the process."""

    async def step(self, turn: Turn) -> Step:
        return Step(reward=float(next(PLAYED)), done=True)
