"""The client side of a sandbox: start it, upload files, run programs, and clean up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from megarl.sandbox.agent import pack
from megarl.usercode.failures import ProcessLost
from megarl.usercode.parent import SELF_CLEANING

if TYPE_CHECKING:
    from megarl.config import schema

START_S = 60.0
"""Timeout in seconds for starting a sandbox, which normally takes a few hundredths of a second."""

ANSWER_S = 20.0
"""Timeout in seconds for the agent's response, in addition to the program's own limit."""

STOP_S = 5.0
"""Seconds that a sandbox has to exit before it is killed."""

POLL_S = 0.002
ERROR_BYTES = 4096


class SandboxError(ProcessLost):
    """Raised when a sandbox itself fails, regardless of the program in it."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a sandbox.

    Attributes:
        arguments: the command line. Its stdin and stdout are connected to the agent.
        environment: environment variables for the command, not for programs.
        files: open file descriptors that the command reads. They are closed in this process once the command has
            started.
        inherited: open file descriptors that programs in the sandbox inherit.
        folder: a folder to remove at the end. The agent also removes it, in case this process is killed.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[int] = ()
    inherited: Sequence[int] = ()
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of running a program.

    Attributes:
        status: exit status, or the negative signal number if a signal killed the program.
        limit: the limit in the `sandbox` section that the program exceeded, such as "wall_s"; "deadline" for the
            sandbox's lifetime; "files" for too many files; None if it exceeded no limit.
        stdout: the program's output. If it is longer than output_bytes, its beginning and end, with a line that reports
            the omission.
        truncated: whether stdout or stderr is longer than output_bytes.
    """

    status: int
    limit: str | None
    seconds: float
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False

    @property
    def succeeded(self) -> bool:
        return self.status == 0 and self.limit is None


class Sandbox(AbstractAsyncContextManager):
    """A running sandbox. Programs run one at a time. Files persist between programs, processes do not. Concurrent calls
    are serialized. After a call fails or is canceled, the sandbox can no longer be used."""

    def __init__(self, command: Command, limits: schema.Sandbox, python: str, deadline_s: float | None):
        """python: path of the interpreter for programs. deadline_s: the sandbox's lifetime in seconds."""
        self._command, self._limits, self.python = command, limits, python
        self._lock, self._is_over = asyncio.Lock(), False
        loop = asyncio.get_running_loop()
        self._deadline = None if deadline_s is None else loop.time() + deadline_s
        self._alarm = None if deadline_s is None else loop.call_later(deadline_s + ANSWER_S, self._end)

    async def start(self) -> Self:
        """Start the sandbox and wait until it is up. Raise SandboxError with the error output if this fails."""
        local, remote = socket.socketpair()
        errors_read, errors_write = os.pipe()
        os.set_blocking(errors_read, False)
        self._errors = open(errors_read, "rb", buffering=0)  # noqa: SIM115 - closed in _wait, or with this object
        try:
            self._process = subprocess.Popen(
                self._command.arguments,
                stdin=remote.fileno(),
                stdout=remote.fileno(),
                stderr=errors_write,
                env={**self._command.environment, SELF_CLEANING: "1"},
                pass_fds=[*self._command.files, *self._command.inherited],
                cwd="/",
                process_group=0,
            )
        except OSError as error:
            local.close()
            self._errors.close()
            raise SandboxError(f"{self._command.arguments[0]} cannot be started: {error}") from None
        finally:
            remote.close()
            for file in (errors_write, *self._command.files):
                os.close(file)
        self._reader, self._writer = await asyncio.open_connection(sock=local)
        try:
            await self._call(None, START_S)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_over(self) -> bool:
        """Whether the sandbox has exited or is about to."""
        return self._is_over or self._process.poll() is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        if self._deadline is None:
            return float("inf")
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def upload(self, name: str, content: bytes | str) -> None:
        """Write a file. A relative path is resolved against the programs' working directory. Raise OSError if there is
        no space or the path is invalid."""
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        [reason] = await self._call([b"write", name.encode(), data], ANSWER_S)
        if reason:
            raise OSError(f"{name}: {reason.decode(errors='replace')}")

    async def run(
        self, arguments: Sequence[str], stdin: bytes = b"", wall_s: float | None = None, merged: bool = False
    ) -> Finished:
        """Run a program until all of its processes have exited.

        Args:
            wall_s: time limit in seconds, if lower than sandbox.wall_s.
            merged: whether stdout also contains the output to stderr, in the order in which it was written.
        """
        limits, remaining_s = self._limits, self.remaining_s
        if remaining_s == 0:
            return Finished(-9, "deadline", 0.0)
        limit_s = limits.wall_s if wall_s is None else min(wall_s, limits.wall_s)
        wall_s = min(limit_s, remaining_s)
        numbers = (
            *(max(1, round(wall_s * 1000)), limits.cpu_s, limits.memory_mib, limits.processes, limits.file_mib),
            limits.output_bytes,
        )
        request = [b"run", " ".join(map(str, numbers)).encode(), b"%d" % merged, stdin]
        request += [argument.encode("utf-8", "replace") for argument in arguments]
        status, limit, milliseconds, *outputs = await self._call(request, wall_s + ANSWER_S)
        if limit == b"wall_s" and wall_s < limit_s:
            limit = b"deadline"
        (stdout, out_truncated), (stderr, err_truncated) = (_joined(outputs[i : i + 3]) for i in (0, 3))
        seconds = int(milliseconds) / 1000
        return Finished(int(status), limit.decode() or None, seconds, stdout, stderr, out_truncated or err_truncated)

    async def stop(self) -> None:
        """Stop the sandbox and everything in it; a pending call fails. Return once everything has exited."""
        self._end()
        async with self._lock:
            await self._wait()

    def _end(self) -> None:
        """Make the agent exit, even if a program is running."""
        self._is_over = True
        if self._alarm is not None:
            self._alarm.cancel()
        with suppress(OSError, RuntimeError):  # the agent has already exited
            self._writer.write_eof()

    async def _wait(self) -> None:
        """Wait until the sandbox has exited. Its output ends once no process can write to it."""
        try:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(STOP_S):
                    while await self._reader.read(ERROR_BYTES):
                        pass
                    while self._process.poll() is None:
                        await asyncio.sleep(POLL_S)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._writer.transport.abort()
            if self._command.folder is not None:
                shutil.rmtree(self._command.folder, ignore_errors=True)
            self._errors.close()

    async def _call(self, request: list[bytes] | None, timeout_s: float) -> list[bytes]:
        """Send a request, if any, and return the response."""
        async with self._lock:
            if self._is_over:
                raise SandboxError("the sandbox has been stopped")
            try:
                async with asyncio.timeout(timeout_s):
                    if request is not None:
                        self._writer.write(pack(request))
                        await self._writer.drain()
                    lengths = [int(length) for length in (await self._reader.readuntil(b"\n")).split()]
                    return [await self._reader.readexactly(length) for length in lengths]
            except TimeoutError:
                self._end()
                await self._wait()
                raise SandboxError(f"the sandbox did not respond within {timeout_s:g} s") from None
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                self._end()
                output = self._error_output()
                await self._wait()
                raise SandboxError(f"the sandbox exited with status {self._process.returncode}{output}") from None
            except BaseException:  # otherwise the next call would receive the response to this request
                self._end()
                raise

    def _error_output(self) -> str:
        """Return the last lines of the sandbox command's error output."""
        lines = (self._errors.read(ERROR_BYTES) or b"").decode(errors="replace").split("\n")
        text = "; ".join(line.strip() for line in lines[-4:] if line.strip())
        return f": {text}" if text else ""


def _joined(fields: Sequence[Any]) -> tuple[bytes, bool]:
    """Join the beginning and end of an output. Return the text, and whether a part was omitted."""
    total, head, tail = int(fields[0]), fields[1], fields[2]
    omitted = total - len(head) - len(tail)
    if omitted == 0:
        return head + tail, False
    return b"%b\n[%d bytes omitted]\n%b" % (head, omitted, tail), True
