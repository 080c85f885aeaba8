"""Environment processes. A process that hangs or dies fails only its own rollouts, never the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.interpreter import PYTHON
from megarl.core.text import encodable
from megarl.usercode.child_process import IMPORT_S, ChildFailure, ConcurrentChild

TOOLS_S = 5.0
"""Extra seconds per tool call in a step, in addition to the call's own timeout."""


class HostFailure(Exception):
    """A failed call to an environment process. `stack` is the stack trace of the environment's exception, or ""."""

    def __init__(self, reason: str, stack: str = ""):
        super().__init__(reason)
        self.stack = stack


@dataclass(frozen=True, slots=True)
class HostArguments:
    """An environment process's arguments: class, options, seconds for a tool call, and the `sandbox` section."""

    name: str
    options: Mapping[str, Any]
    tool_timeout_s: float
    sandbox: Mapping[str, Any]


def host_arguments(config: Config) -> HostArguments:
    """Return the process arguments for a config that names an environment."""
    settings = config.environment
    assert settings.name is not None, "the run has no environment"
    return HostArguments(settings.name, settings.options, settings.tool_timeout_s, config.sandbox.model_dump())


class HostProcess(ConcurrentChild):
    """One environment process."""

    def __init__(self) -> None:
        super().__init__([*PYTHON, "-m", "megarl.environments.host"])
        self.num_rollouts = 0
        self.is_retiring = False
        """Whether something in the process hangs. It then accepts no new rollouts and is killed after its last one."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.is_agent = False

    @classmethod
    async def start(cls, arguments: HostArguments) -> HostProcess:
        """Start a process and wait until it has imported the environment class. Raise UserError if that fails."""
        host = cls()
        try:
            hello = encodable(await host.open(asdict(arguments), IMPORT_S))
        except ChildFailure as failure:
            raise UserError(failure.import_error(f"environment.class={arguments.name}", IMPORT_S)) from None
        if "refused" in hello:
            await host.end()
            raise UserError(hello["refused"])
        host.tools, host.is_agent = hello["tools"], hello["is_agent"]
        return host

    async def invoke(self, method: str, rollout: str, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the rollout's environment and return its result. Raise HostFailure if it raises or hangs."""
        ended = "the environment's process " + ("has exited" if self.is_over else "exited")
        try:
            response = encodable(await self.request(timeout_s, method=method, rollout=rollout, **arguments))
        except ChildFailure as failure:
            if not failure.timed_out:
                raise HostFailure(f"{ended} ({failure})") from None
            if not self.is_retiring:
                await asyncio.to_thread(self.show_stacks)
            self.is_retiring = True
            key = "environment.agent_timeout_s" if method == "run" else "environment.timeout_s"
            raise HostFailure(
                f"{method} did not return within {timeout_s:g} s. Fix: make it faster, or raise {key}"
            ) from None
        if "failure" in response:
            raise HostFailure(response["failure"], response["stack"])
        return response["value"]


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
        """Assign a rollout to the process with the fewest ones. Replace exited and retiring processes first."""
        await asyncio.shield(self._replace_ended())  # an aborted rollout must not leave a process half started
        host = min(self._hosts, key=lambda host: host.num_rollouts)
        host.num_rollouts += 1
        return host

    async def _replace_ended(self) -> None:
        async with self._replacing:
            for index, host in enumerate(self._hosts):
                if host.is_over or host.is_retiring:
                    self._hosts[index] = await HostProcess.start(self._arguments)
                    if not host.num_rollouts:
                        await host.end()

    async def give_back(self, host: HostProcess) -> None:
        """Release a process at the end of a rollout. If it has been replaced and this was its last rollout, kill it."""
        host.num_rollouts -= 1
        if host not in self._hosts and not host.num_rollouts:
            await host.end()

    async def close(self) -> None:
        """Kill all processes. Without this call they exit when this process does."""
        await asyncio.gather(*(host.end() for host in self._hosts))
