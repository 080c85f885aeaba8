"""The processes in which environments live: one that hangs or ends costs the rollouts in it, never the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from megarl.config.schema import Config
from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.environments.host import LONGEST_LINE
from megarl.environments.pool import IMPORT_S, STACKS_S

TOOLS_S = 5.0
"""The time beyond the limit of each call of a tool that a step has."""


class HostFailure(Exception):
    """The failure of a call. stack: of what the environment raised, or ""."""

    def __init__(self, reason: str, stack: str = ""):
        super().__init__(reason)
        self.stack = stack


@dataclass(frozen=True, slots=True)
class HostArguments:
    """The arguments of a host's process: the environment's name and options, the wall-clock time of a tool, and section
    `sandbox` of the config."""

    name: str
    options: Mapping[str, Any]
    tool_timeout_s: float
    sandbox: Mapping[str, Any]


def host_arguments(config: Config) -> HostArguments:
    """Returns those of a run with an environment."""
    settings = config.environment
    assert settings.name is not None, "the run has an environment"
    return HostArguments(settings.name, settings.options, settings.tool_timeout_s, config.sandbox.model_dump())


class HostProcess:
    """One process, in a group of its own, so that what it starts is killed with it."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.num_rollouts = 0
        self.is_retiring = False
        """Whether it takes no new rollouts, as something in it hangs, and ends with the last one that it has."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.is_agent = False

    @classmethod
    async def start(cls, arguments: HostArguments) -> HostProcess:
        """Returns when the process has found its environments' class. Raises UserError if it has not."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megarl.environments.host", json.dumps(asdict(arguments))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=os.setpgrp,  # uvloop, in which Ray's actors run, knows no process_group
            limit=LONGEST_LINE,
        )
        host = cls(process)
        try:
            line = await asyncio.wait_for(process.stdout.readline(), IMPORT_S)
        except TimeoutError:
            await host.show_stacks()
            await host.kill()
            raise UserError(
                f"environment.class: importing {arguments.name} did not end within {IMPORT_S:g} s; mend the file"
            ) from None
        said = json.loads(line) if line else {}
        if "tools" not in said:
            await host.kill()
            raise UserError(
                said.get("refused")
                or f"environment.class: importing {arguments.name} ended the process ({host.status}); fix the file"
            )
        host.tools, host.is_agent = said["tools"], said["is_agent"]
        host._reading = asyncio.create_task(host._read())
        return host

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None or (self._reading is not None and self._reading.done())

    @property
    def status(self) -> str:
        code = self._process.returncode
        return f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name

    async def call(self, do: str, rollout: str, timeout_s: float, **given: Any) -> Any:
        """Returns what a rollout's environment answers. Raises HostFailure if it raises, or does not answer in
        time."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "do": do, "rollout": rollout, **given})
        try:
            if self.has_ended:
                raise HostFailure(f"its process has ended ({self.status})")
            with suppress(ConnectionError):  # a process that has ended fails all its calls
                self._process.stdin.write(line.encode() + b"\n")
                await self._process.stdin.drain()
            answer = await asyncio.wait_for(answered, timeout_s)
        except TimeoutError:
            if not self.is_retiring:
                await self.show_stacks()
            self.is_retiring = True
            raise HostFailure(f"{do} did not return within {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
        if "failure" in answer:
            raise HostFailure(answer["failure"], answer["stack"])
        return answer["value"]

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(HostFailure(f"the environment ended its process ({self.status})"))

    async def show_stacks(self) -> None:
        """Makes the process write on its standard error where it is."""
        with suppress(ProcessLookupError):
            self._process.send_signal(stacks.SIGNAL)
        await asyncio.sleep(STACKS_S)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and so has what it started
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class HostPool:
    """Processes with environments of one class, each with many rollouts."""

    def __init__(self, arguments: HostArguments):
        self._arguments = arguments
        self._hosts: list[HostProcess] = []
        self._replacing = asyncio.Lock()

    @classmethod
    async def start(cls, arguments: HostArguments, num_processes: int) -> HostPool:
        """Returns when all processes are up. Raises UserError as HostProcess.start does."""
        pool = cls(arguments)
        pool._hosts = list(await asyncio.gather(*(HostProcess.start(arguments) for _ in range(num_processes))))
        return pool

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The descriptions of the environments' tools."""
        return self._hosts[0].tools

    @property
    def is_agent(self) -> bool:
        """Whether the class is an agent, which is called with `run` in place of `reset` and `step`."""
        return self._hosts[0].is_agent

    async def take(self) -> HostProcess:
        """Returns the process with the fewest rollouts, which gets one more. In place of one that has ended, or takes
        no more, another one is started."""
        async with self._replacing:
            for place, host in enumerate(self._hosts):
                if host.has_ended or host.is_retiring:
                    self._hosts[place] = await HostProcess.start(self._arguments)
                    if not host.num_rollouts:
                        await host.kill()
        host = min(self._hosts, key=lambda host: host.num_rollouts)
        host.num_rollouts += 1
        return host

    async def give_back(self, host: HostProcess) -> None:
        """Takes back a process when a rollout in it is over."""
        host.num_rollouts -= 1
        if host not in self._hosts and not host.num_rollouts:
            await host.kill()

    async def close(self) -> None:
        """Ends all processes. Else they end with this one."""
        await asyncio.gather(*(host.kill() for host in self._hosts))
