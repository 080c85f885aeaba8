"""The interface of sandbox providers, which start sandboxes."""

from __future__ import annotations

import binascii
import marshal
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from megarl.sandbox.sandbox import Command, Sandbox, SandboxError

if TYPE_CHECKING:
    from megarl.config import schema

AGENT = Path(__file__).with_name("agent.py").read_text(encoding="utf-8")
"""The agent's source code, which other Python interpreters run."""

_CODE = binascii.b2a_base64(marshal.dumps(compile(AGENT, "agent", "exec", optimize=2)), newline=False).decode()

OWN_AGENT = (
    *(os.path.realpath(sys.executable), "-I", "-S", "-c"),
    f"# megarl sandbox agent\nimport binascii, marshal\nexec(marshal.loads(binascii.a2b_base64('{_CODE}')))",
)
"""Command that runs the agent in this Python interpreter. The agent is compiled in advance, which saves a third of its
startup time."""

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class Provider(ABC):
    """Base class of sandbox providers, one per isolation method. Providers apply the limits of the config section
    `sandbox`."""

    name: ClassVar[str]

    python: str = sys.executable
    """Path of the Python interpreter inside a sandbox."""

    def __init__(self, limits: schema.Sandbox, deadline_s: float | None = None):
        """deadline_s: default lifetime of a sandbox, in seconds."""
        self.limits, self._deadline_s = limits, deadline_s

    @abstractmethod
    def command(self) -> Command:
        """Return the command that starts one sandbox."""

    async def start(self, deadline_s: float | None = None, file: int | None = None) -> Sandbox:
        """Start a sandbox, to be used with `async with`.

        Args:
            deadline_s: the sandbox's lifetime in seconds; None: the provider's default.
            file: open file descriptor that programs in the sandbox inherit with the same number.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        command = self.command()
        if file is not None:
            command = replace(command, inherited=(file,))
        return await Sandbox(command, self.limits, self.python, deadline_s).start()

    async def try_out(self) -> None:
        """Run an empty program in a sandbox. Raise SandboxError if that fails."""
        async with await self.start() as sandbox:
            finished = await sandbox.run([self.python, "-c", ""])
        if not finished.succeeded:
            output = " ".join(finished.stderr.decode(errors="replace").split())
            reason = finished.limit or f"exit status {finished.status}"
            raise SandboxError(f"{self.python} does not run in the sandbox ({reason}): {output}")
