"""Environments of the verifiers library (0.4): its tasksets, harnesses and rewards, and the endpoint as their model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megarl.environments.agent import Agent
from megarl.environments.protocol import Task

PROGRAM = Path(__file__).with_name("verifiers_program.py")
LONGEST_LINE = 2**26


class VerifiersAgent(Agent):
    """A rollout of an environment of verifiers.

    verifiers asks for other versions of packages than vLLM, so that it lives in a process of its own, which the agents
    of this process share.
    """

    def __init__(
        self,
        env: Mapping[str, Any],
        num_tasks: int | None = None,
        python: str | None = None,
        path: Sequence[str] = (),
    ):
        """
        env         verifiers' own `env` section: `{taskset: {id: …}, agent: {harness: {id: …}, runtime: {type: …}}}`
        num_tasks   how many of the taskset's first tasks are used; None: all
        python      the Python of an environment that has verifiers and the taskset; None: this one
        path        folders with packages that come before those of that Python
        """
        self._arguments = json.dumps({"env": dict(env), "num_tasks": num_tasks})
        self._python = python or sys.executable
        self._path = tuple(map(os.path.abspath, path))  # what verifiers starts has folders of its own

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> Mapping[str, float] | None:
        """Play the task whose number is the column `idx` of the row; without it, one that the seed chooses. Return
        its rewards by name."""
        program = await _program(self._python, self._path, self._arguments)
        given = {"index": task.columns.get("idx"), "seed": task.seed}
        return await program.run(base_url=base_url, api_key=api_key, model=model, **given) or None


class _Program:
    """A process with environments of verifiers, for any number of rollouts at once."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: str, path: Sequence[str], arguments: str) -> _Program:
        """Return when the process has its tasks. Raises RuntimeError if it cannot have them."""
        folders = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(python, str(PROGRAM), arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
            # It outlives what kills this process: when its stdin ends, it ends all that verifiers has started, which
            # lives in sessions of its own.
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        program = cls(process)
        line = await process.stdout.readline()
        said = json.loads(line) if line else {}
        if "num_tasks" not in said:
            status = await process.wait()
            why = said.get("refused", f"it ended with exit status {status}; its output is in this process's log")
            raise RuntimeError(f"verifiers cannot have this environment: {why}")
        program._reading = asyncio.create_task(program._read())
        return program

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def run(self, **request: Any) -> dict[str, float]:
        """Return the rewards of a rollout. Raises RuntimeError if it fails."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, "do": "run", **request})
        try:
            answer = await answered
        except asyncio.CancelledError:
            self._write({"id": number, "do": "cancel"})
            raise
        finally:
            del self._waiting[number]
        if "failure" in answer:
            raise RuntimeError(answer["failure"])
        return answer["rewards"]

    def _write(self, line: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        status = await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"failure": f"the process of verifiers ended with exit status {status}"})


_programs: dict[tuple[Any, ...], asyncio.Task[_Program]] = {}


async def _program(*arguments: Any) -> _Program:
    """Return the process with these arguments. It is started for the first rollout, and again when it has ended."""
    found = _programs.get(arguments)
    if found is None or (found.done() and (found.cancelled() or found.exception() or found.result().has_ended)):
        found = _programs[arguments] = asyncio.create_task(_Program.start(*arguments))
    return await asyncio.shield(found)
