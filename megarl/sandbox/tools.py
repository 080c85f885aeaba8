"""Code execution tools for a policy. Their descriptions are generated from names, arguments and docstrings."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Finished, Sandbox

LIMITS = {
    "wall_s": "it ran too long",
    "deadline": "the time limit for all calls has been reached",
    "cpu_s": "it used too much CPU time",
    "memory_mib": "it used too much memory",
    "processes": "it had too many processes",
    "files": "it had too many files",
}
"""Message for the policy when a program exceeds a limit, keyed by limit."""


class CodeTools(AbstractAsyncContextManager):
    """The tools `python` and `shell` for one rollout.

    They return text even if a program fails, and raise SandboxError if the sandbox itself fails.
    """

    def __init__(self, provider: Provider, keeps_files: bool = True, deadline_s: float | None = None):
        """
        Args:
            keeps_files: whether all calls share one sandbox, so that files persist between calls. Otherwise each call
                has its own sandbox.
            deadline_s: lifetime of each sandbox, in seconds.
        """
        self._provider, self._keeps_files, self._deadline_s = provider, keeps_files, deadline_s
        self._sandbox: Sandbox | None = None

    async def python(self, code: str) -> str:
        """Run a Python program and return what it printed, or its error. Variables are not kept between calls.

        Args:
            code: The program. Only what it prints is returned.
        """
        return await self._run(["python", "-c", code])

    async def shell(self, command: str) -> str:
        """Run a shell command and return what it printed, errors included. There is no network.

        Args:
            command: The command, for bash.
        """
        return await self._run(["bash", "-c", command])

    async def close(self) -> None:
        """Stop the sandbox, if there is one."""
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, arguments: list[str]) -> str:
        if not self._keeps_files:
            async with await self._provider.start(self._deadline_s) as sandbox:
                return text_of(await sandbox.run(arguments, merged=True))
        if self._sandbox is None or self._sandbox.is_over:
            await self.close()
            self._sandbox = await self._provider.start(self._deadline_s)
        return text_of(await self._sandbox.run(arguments, merged=True))


def text_of(finished: Finished) -> str:
    """Return a program's output, followed by the reason if it failed."""
    text = finished.stdout.decode(errors="replace")
    if finished.limit is not None:
        end = f"[ended: {LIMITS[finished.limit]}]"
    elif finished.status < 0:
        end = f"[ended by signal {-finished.status}]"
    elif finished.status > 0:
        end = f"[exit status {finished.status}]"
    else:
        return text
    return f"{text}\n{end}" if text and not text.endswith("\n") else f"{text}{end}"
