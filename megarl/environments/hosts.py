"""Environment processes. A process that hangs or dies fails only its own rollouts, never the run."""

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
"""Extra seconds per tool call in a step, in addition to the call's own timeout."""


class HostFailure(Exception):
    """A failed call to an environment process.

    Attributes:
        stack: stack trace of the environment's exception, or "".
    """

    def __init__(self, reason: str, stack: str = ""):
        super().__init__(reason)
        self.stack = stack


@dataclass(frozen=True, slots=True)
class HostArguments:
    """Arguments for an environment process.

    Attributes:
        name: `environment.class`.
        options: `environment.options`.
        tool_timeout_s: wall-clock limit for one tool call, in seconds.
        sandbox: the config's `sandbox` section.
    """

    name: str
    options: Mapping[str, Any]
    tool_timeout_s: float
    sandbox: Mapping[str, Any]


def host_arguments(config: Config) -> HostArguments:
    """Return the process arguments for a config that names an environment."""
    settings = config.environment
    assert settings.name is not None, "the run has no environment"
    return HostArguments(settings.name, settings.options, settings.tool_timeout_s, config.sandbox.model_dump())


class HostProcess:
    """One environment process. It has its own process group, so that killing it also kills its children."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.num_rollouts = 0
        self.is_retiring = False
        """Whether something in the process hangs. A retiring process accepts no new rollouts and is killed after its
        last rollout."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.is_agent = False

    @classmethod
    async def start(cls, arguments: HostArguments) -> HostProcess:
        """Start a process and wait until it has imported the environment class. Raise UserError if that fails."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megarl.environments.host", json.dumps(asdict(arguments))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=os.setpgrp,  # Ray actors run in uvloop, which does not support process_group
            limit=LONGEST_LINE,
        )
        host = cls(process)
        try:
            line = await asyncio.wait_for(process.stdout.readline(), IMPORT_S)
        except TimeoutError:
            await host.show_stacks()
            await host.kill()
            raise UserError(
                f"environment.class={arguments.name}: the import did not finish within {IMPORT_S:g} s. Fix: move slow "
                "work out of the file's top level"
            ) from None
        hello = json.loads(line) if line else {}
        if "tools" not in hello:
            await host.kill()
            raise UserError(
                hello.get("refused")
                or f"environment.class={arguments.name}: the import ended the process ({host.status}). Fix: correct "
                "the file (its output is in this process's log)"
            )
        host.tools, host.is_agent = hello["tools"], hello["is_agent"]
        host._reading = asyncio.create_task(host._read())
        return host

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None or (self._reading is not None and self._reading.done())

    @property
    def status(self) -> str:
        code = self._process.returncode
        return f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name

    async def call(self, method: str, rollout: str, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the rollout's environment and return its result. Raise HostFailure if the method raises or
        times out."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "method": method, "rollout": rollout, **arguments})
        try:
            if self.has_ended:
                raise HostFailure(f"the environment's process has exited ({self.status})")
            with suppress(ConnectionError):  # when the process dies, `_read` fails all pending calls
                self._process.stdin.write(line.encode() + b"\n")
                await self._process.stdin.drain()
            response = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            if not self.is_retiring:
                await self.show_stacks()
            self.is_retiring = True
            raise HostFailure(f"{method} did not return within {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
        if "failure" in response:
            raise HostFailure(response["failure"], response["stack"])
        return response["value"]

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            response = json.loads(line)
            future = self._waiting.get(response["id"])
            if future is not None and not future.done():
                future.set_result(response)
        await self._process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HostFailure(f"the environment's process exited ({self.status})"))

    async def show_stacks(self) -> None:
        """Make the process write its stack traces to stderr."""
        with suppress(ProcessLookupError):
            self._process.send_signal(stacks.SIGNAL)
        await asyncio.sleep(STACKS_S)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):  # the whole process group has already exited
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class HostPool:
    """A pool of processes that host environments of one class. Each process hosts many rollouts."""

    def __init__(self, arguments: HostArguments):
        self._arguments = arguments
        self._hosts: list[HostProcess] = []
        self._replacing = asyncio.Lock()

    @classmethod
    async def start(cls, arguments: HostArguments, num_processes: int) -> HostPool:
        """Start all processes. Raise UserError if HostProcess.start does."""
        pool = cls(arguments)
        pool._hosts = list(await asyncio.gather(*(HostProcess.start(arguments) for _ in range(num_processes))))
        return pool

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON-schema descriptions of the environments' tools."""
        return self._hosts[0].tools

    @property
    def is_agent(self) -> bool:
        """Whether the class is an agent, which has `run` instead of `reset` and `step`."""
        return self._hosts[0].is_agent

    async def take(self) -> HostProcess:
        """Assign a new rollout to the process with the fewest rollouts and return that process. Replace exited and
        retiring processes first."""
        await asyncio.shield(self._replace_ended())  # an aborted rollout must not leave a process half started
        host = min(self._hosts, key=lambda host: host.num_rollouts)
        host.num_rollouts += 1
        return host

    async def _replace_ended(self) -> None:
        async with self._replacing:
            for index, host in enumerate(self._hosts):
                if host.has_ended or host.is_retiring:
                    self._hosts[index] = await HostProcess.start(self._arguments)
                    if not host.num_rollouts:
                        await host.kill()

    async def give_back(self, host: HostProcess) -> None:
        """Release a process at the end of a rollout. If the process has been replaced, kill it after its last
        rollout."""
        host.num_rollouts -= 1
        if host not in self._hosts and not host.num_rollouts:
            await host.kill()

    async def close(self) -> None:
        """Kill all processes. Without this call they exit when this process exits."""
        await asyncio.gather(*(host.kill() for host in self._hosts))
