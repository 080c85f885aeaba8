"""Environments from the verifiers library (0.4), which use the session endpoint as their model."""

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
    """A rollout in a verifiers environment.

    The dependencies of verifiers conflict with those of vLLM. So verifiers runs in a separate process, which all agents
    in this process share.
    """

    def __init__(
        self,
        env: Mapping[str, Any],
        num_tasks: int | None = None,
        python: str | None = None,
        path: Sequence[str] = (),
    ):
        """
        Args:
            env: `env` section for verifiers, `{taskset: {id: …}, agent: {harness: {id: …}, runtime: {type: …}}}`.
            num_tasks: use only the first `num_tasks` tasks. None: all.
            python: Python executable with verifiers and the taskset installed. None: the current one.
            path: directories to prepend to PYTHONPATH.
        """
        self._arguments = json.dumps({"env": dict(env), "num_tasks": num_tasks})
        self._python = python or sys.executable
        self._path = tuple(map(os.path.abspath, path))  # child processes of verifiers change directories

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> Mapping[str, float] | None:
        """Run the task whose index is in the row's `idx` column, or a task selected by the seed. Return its rewards,
        keyed by name."""
        program = await _program(self._python, self._path, self._arguments)
        selection = {"index": task.columns.get("idx"), "seed": task.seed}
        return await program.run(base_url=base_url, api_key=api_key, model=model, **selection) or None


class _Program:
    """A verifiers process, which runs any number of rollouts concurrently."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: str, path: Sequence[str], arguments: str) -> _Program:
        """Start the process and wait until it has loaded its tasks. Raise RuntimeError if that fails."""
        folders = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(python, str(PROGRAM), arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
            # It must survive when this process's group is killed: once its stdin closes, it stops the processes that
            # verifiers started in other process sessions.
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        program = cls(process)
        line = await process.stdout.readline()
        hello = json.loads(line) if line else {}
        if "num_tasks" not in hello:
            status = await process.wait()
            reason = hello.get("refused", f"exit status {status}, see the output in this process's log")
            raise RuntimeError(f"verifiers cannot load this environment: {reason}")
        program._reading = asyncio.create_task(program._read())
        return program

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def run(self, **request: Any) -> dict[str, float]:
        """Run a rollout and return its rewards. Raise RuntimeError if it fails."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, "method": "run", **request})
        try:
            response = await future
        except asyncio.CancelledError:
            self._write({"id": number, "method": "cancel"})
            raise
        finally:
            del self._waiting[number]
        if "failure" in response:
            raise RuntimeError(response["failure"])
        return response["rewards"]

    def _write(self, line: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            response = json.loads(line)
            future = self._waiting.get(response["id"])
            if future is not None and not future.done():
                future.set_result(response)
        status = await self._process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"failure": f"the verifiers process exited with status {status}"})


_programs: dict[tuple[Any, ...], asyncio.Task[_Program]] = {}


async def _program(*arguments: Any) -> _Program:
    """Return the process for these arguments. The first rollout starts it, and later rollouts restart it if it has
    exited."""
    start = _programs.get(arguments)
    if start is None or (start.done() and (start.cancelled() or start.exception() or start.result().has_ended)):
        start = _programs[arguments] = asyncio.create_task(_Program.start(*arguments))
    return await asyncio.shield(start)
