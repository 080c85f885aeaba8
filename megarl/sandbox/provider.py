"""What starts sandboxes: the interface that all ways of isolating programs have in common."""

from __future__ import annotations

import binascii
import marshal
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from megarl.config import schema
from megarl.sandbox.sandbox import Command, Sandbox, SandboxError

AGENT = Path(__file__).with_name("agent.py").read_text(encoding="utf-8")
"""The agent for another Python."""

_CODE = binascii.b2a_base64(marshal.dumps(compile(AGENT, "agent", "exec", optimize=2)), newline=False).decode()

OWN_AGENT = (
    *(os.path.realpath(sys.executable), "-I", "-S", "-c"),
    f"# megarl's agent of a sandbox\nimport binascii, marshal\nexec(marshal.loads(binascii.a2b_base64('{_CODE}')))",
)
"""The command of the agent in this Python, for which it is compiled: that is a third of the time of its start."""

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class Provider(ABC):
    """A way to isolate programs, with the limits of a config."""

    name: ClassVar[str]

    python: str = sys.executable
    """The interpreter of programs, as it is called in a sandbox."""

    def __init__(self, limits: schema.Sandbox, deadline_s: float | None = None):
        """deadline_s: how long a sandbox may live, unless it is started with another time."""
        self.limits, self._deadline_s = limits, deadline_s

    @abstractmethod
    def command(self) -> Command:
        """Returns the command that starts one sandbox."""

    async def start(self, deadline_s: float | None = None) -> Sandbox:
        """Returns a sandbox that runs, for `async with`. deadline_s: how long it may live."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return await Sandbox(self.command(), self.limits, self.python, deadline_s).start()

    async def try_out(self) -> None:
        """Runs nothing in a sandbox. Raises SandboxError where that does not work."""
        async with await self.start() as sandbox:
            finished = await sandbox.run([self.python, "-c", ""])
        if not finished.succeeded:
            said = " ".join(finished.stderr.decode(errors="replace").split())
            why = finished.limit or f"exit status {finished.status}"
            raise SandboxError(f"{self.python} does not run in it ({why}): {said}")
