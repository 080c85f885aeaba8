"""Environments from the verifiers library (0.4), which use the session endpoint as their model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megarl.environments.protocol import Agent, Task
from megarl.usercode.child_process import ChildFailure, ConcurrentChild
from megarl.usercode.failures import ProcessLost

PROGRAM = Path(__file__).with_name("verifiers_program.py")


class VerifiersAgent(Agent):
    """A rollout in a verifiers environment. The dependencies of verifiers conflict with those of vLLM. Therefore,
    verifiers runs in a separate process, which all agents in this process share."""

    def __init__(
        self, env: Mapping[str, Any], num_tasks: int | None = None, python: str | None = None, path: Sequence[str] = ()
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
        """Run the task with the row's `idx`, or one selected by the seed. Return its rewards, keyed by name."""
        program = await _program(self._python, self._path, self._arguments)
        selection = {"index": task.columns.get("idx"), "seed": task.seed}
        return await program.run(base_url=base_url, api_key=api_key, model=model, **selection) or None


class _Program(ConcurrentChild):
    """A verifiers process, which runs any number of rollouts concurrently."""

    _rollouts: Iterator[int]

    @classmethod
    async def start(cls, python: str, path: Sequence[str], arguments: str) -> _Program:
        """Start the process and wait until it has loaded its tasks. Raise RuntimeError if that fails."""
        folders = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})
        # The program may outlive this process, so that it can stop the processes that verifiers has started, some of
        # them on other machines.
        program = cls([python, str(PROGRAM)], environment, is_self_cleaning=True)
        try:
            hello = await program.open(json.loads(arguments))
        except ChildFailure as failure:
            if failure.was_killed:
                raise ProcessLost(f"the verifiers process was killed while it started ({failure})") from None
            hello = {"refused": f"{failure}, see its output in the run's environments-*.log"}
        if "refused" in hello:
            await program.end()
            raise RuntimeError(
                f"verifiers cannot load this environment: {hello['refused']}. Fix: change environment.options.env, or "
                "set environment.options.python to an interpreter with verifiers and the taskset"
            )
        program._rollouts = count()
        return program

    async def run(self, **arguments: Any) -> dict[str, float]:
        """Run a rollout and return its rewards. Raise RuntimeError if it fails, and ProcessLost if the process
        exits."""
        rollout = next(self._rollouts)
        try:
            response = await self.request(method="run", rollout=rollout, **arguments)
        except ChildFailure as failure:
            raise ProcessLost(f"the verifiers process exited ({failure})") from None
        except asyncio.CancelledError:
            await self.post({"method": "cancel", "rollout": rollout})
            raise
        if "failure" in response:
            raise RuntimeError(response["failure"])
        return response["rewards"]


_programs: dict[tuple[Any, ...], asyncio.Task[_Program]] = {}


async def _program(*arguments: Any) -> _Program:
    """Return the process for these arguments. The first rollout starts it; later ones restart it if it has exited."""
    start = _programs.get(arguments)
    if start is None or (start.done() and (start.cancelled() or start.exception() or start.result().is_over)):
        start = _programs[arguments] = asyncio.create_task(_Program.start(*arguments))
    return await asyncio.shield(start)
