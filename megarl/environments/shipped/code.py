"""Tasks for a policy that runs code in a sandbox. The sandbox exists for the duration of the rollout."""

from __future__ import annotations

from megarl.environments.protocol import Environment
from megarl.environments.tools import tool
from megarl.sandbox.provider import Provider
from megarl.sandbox.tools import CodeTools


class CodeEnvironment(Environment):
    """The tools `python` and `shell`. A turn without a tool call ends the rollout, and reward functions score it."""

    def __init__(self, sandbox: Provider, keeps_files: bool = True):
        """
        Args:
            sandbox: sandbox provider from the config's `sandbox` section. Not one of environment.options.
            keeps_files: whether all calls in a rollout share one sandbox and its files.
        """
        self._tools = CodeTools(sandbox, keeps_files)

    @tool
    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it printed, or its error. Variables are not kept between calls.

        Args:
            code: The program. Only what it prints is returned.
        """
        return await self._tools.python(code)

    @tool
    async def shell(self, command: str) -> str:
        """Runs a shell command and returns what it printed, errors included. There is no network.

        Args:
            command: The command, for bash.
        """
        return await self._tools.shell(command)

    async def close(self) -> None:
        """Stop the sandbox."""
        await self._tools.close()
