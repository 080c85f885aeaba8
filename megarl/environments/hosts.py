"""Environment processes. A process that hangs or dies affects only its own rollouts, never the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.usercode.child_process import IMPORT_S, ChildFailure, ConcurrentChild
from megarl.usercode.failures import RESTARTS, Kind

TOOLS_S = 5.0
"""Extra seconds per tool call in a step, in addition to the call's own timeout."""


FREE_MEMORY = (
    "The kernel kills processes when memory runs out. Fix: lower environment.processes or environment.memory_mib, or "
    "run on a node with more memory"
)


class HostFailure(Exception):
    """A failed call to an environment process.

    Attributes:
        stack: stack trace of the environment's exception, or "".
        is_infrastructure: whether the cause lies outside the environment's code: its process was killed, or a service
            is unavailable. False if the process exited or crashed by itself. The kind is then also "lost", but the
            environment's code is at fault.
    """

    def __init__(self, reason: str, stack: str = "", kind: Kind = "error", is_infrastructure: bool = False):
        super().__init__(reason)
        self.stack, self.kind, self.is_infrastructure = stack, kind, is_infrastructure


@dataclass(frozen=True, slots=True)
class HostArguments:
    """An environment process's arguments: class, options, time limit for a tool call, the `sandbox` section, and the
    memory limit."""

    name: str
    options: Mapping[str, Any]
    tool_timeout_s: float
    sandbox: Mapping[str, Any]
    memory_mib: int | None = None


def host_arguments(config: Config) -> HostArguments:
    """Return the process arguments for a config that names an environment."""
    settings = config.environment
    assert settings.name is not None, "the run has no environment"
    sandbox = config.sandbox.model_dump()
    return HostArguments(settings.name, settings.options, settings.tool_timeout_s, sandbox, settings.memory_mib)


class HostProcess(ConcurrentChild):
    """One environment process."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "megarl.environments.host"])
        self.num_rollouts = 0
        self.is_retiring = False
        """Whether a call in the process hung or ran out of memory. The process then accepts no new rollouts and is
        killed after its last rollout."""
        self.is_alone = False
        """Whether the process belongs to a single rollout."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.is_agent = False
        self._memory_mib: int | None = None

    @classmethod
    async def start(cls, arguments: HostArguments) -> HostProcess:
        """Start a process, wait until it has imported the environment class, and limit its memory. If the process is
        killed, start another one, up to RESTARTS times. Raise UserError if the class cannot be loaded, and
        InfrastructureFailure if all processes are killed."""
        for _ in range(RESTARTS + 1):
            host = cls()
            try:
                hello = await host.open(asdict(arguments), IMPORT_S)
            except ChildFailure as failure:
                if failure.was_killed:
                    continue
                raise UserError(failure.import_error(f"environment.class={arguments.name}", IMPORT_S)) from None
            if "refused" in hello:
                await host.end()
                raise UserError(hello["refused"])
            host.tools, host.is_agent = hello["tools"], hello["is_agent"]
            if arguments.memory_mib is not None:
                host._memory_mib = arguments.memory_mib
                host.limit_memory(arguments.memory_mib)
            return host
        raise InfrastructureFailure(
            f"environment.class={arguments.name}: its process was killed {RESTARTS + 1} times while it started. "
            f"{FREE_MEMORY}"
        )

    async def invoke(self, method: str, rollout: str, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the rollout's environment and return its result. Raise HostFailure if it raises or hangs."""
        ended = "the environment's process " + ("has exited" if self.is_over else "exited")
        try:
            response = await self.request(timeout_s, method=method, rollout=rollout, **arguments)
        except ChildFailure as failure:
            if not failure.timed_out:
                reason = failure.with_limit("environment.memory_mib", self._memory_mib)
                raise HostFailure(f"{ended} ({reason})", kind="lost", is_infrastructure=failure.was_killed) from None
            if not self.is_retiring:
                await asyncio.to_thread(self.show_stacks)
            self.is_retiring = True
            key = "environment.agent_timeout_s" if method == "run" else "environment.timeout_s"
            raise HostFailure(
                f"{method} did not return within {timeout_s:g} s. Fix: make it faster, or raise {key}"
            ) from None
        if "failure" in response:
            failure, kind = response["failure"], response["kind"]
            if "raised MemoryError" in failure:
                self.is_retiring = True
                failure = f"{failure} (environment.memory_mib={self._memory_mib})"
                raise HostFailure(failure, response["stack"], kind)
            raise HostFailure(failure, response["stack"], kind, is_infrastructure=kind != "error")
        return response["value"]


class HostPool:
    """A pool of processes that host environments of one class. Each process hosts many rollouts."""

    def __init__(self, arguments: HostArguments):
        self._arguments = arguments
        self._hosts: list[HostProcess] = []
        self._replacing = asyncio.Lock()
        self._alone = asyncio.Semaphore()

    @classmethod
    async def start(cls, arguments: HostArguments, num_processes: int) -> HostPool:
        """Start all processes. Raise the same errors as `HostProcess.start`."""
        pool = cls(arguments)
        pool._alone = asyncio.Semaphore(num_processes)
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
        """Assign a rollout to the process with the fewest rollouts. Replace exited and retiring processes first."""
        await asyncio.shield(self._replace_ended())  # shield: an aborted rollout must not leave a process half started
        host = min(self._hosts, key=lambda host: host.num_rollouts)
        host.num_rollouts += 1
        return host

    async def take_alone(self) -> HostProcess:
        """Start a process for a single rollout. The number of such processes is limited to the size of the pool."""
        await self._alone.acquire()
        starting = asyncio.create_task(HostProcess.start(self._arguments))
        try:
            host = await asyncio.shield(starting)
        except BaseException:
            self._alone.release()
            starting.add_done_callback(_end_started)
            raise
        host.num_rollouts, host.is_alone = 1, True
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
        if host.is_alone:
            self._alone.release()
        if host not in self._hosts and not host.num_rollouts:
            await host.end()

    async def close(self) -> None:
        """Kill all processes. Without this call they exit when this process does."""
        await asyncio.gather(*(host.end() for host in self._hosts))


def _end_started(starting: asyncio.Task[HostProcess]) -> None:
    """Kill a process whose rollout was aborted while the process started."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
