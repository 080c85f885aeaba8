"""A sandbox, as the process that has started it sees it: files go in, programs run, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from megarl.config import schema
from megarl.sandbox.agent import pack

START_S = 60.0
"""The time that a sandbox has to start, which takes some hundredths of a second."""

ANSWER_S = 20.0
"""The time that an answer has beside the program's own."""

STOP_S = 5.0
"""The time that a sandbox has to end by itself."""

POLL_S = 0.002
ERROR_BYTES = 4096


class SandboxError(RuntimeError):
    """The failure of a sandbox itself, which says nothing of the program that it was for."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a sandbox.

    arguments     its agent's standard input and output are this command's
    environment   of the command, not of programs
    files         open files that it reads; they are closed when it has them
    folder        a folder that is removed in the end; the agent does so, too, if this process no longer can
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[int] = ()
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a program.

    status      its exit status; if a signal ended it, the signal's number, negative
    limit       the limit of section `sandbox` that it was ended for, such as "wall_s"; "deadline" for that of the
                sandbox, "files" for too many of them; None: it ended by itself
    seconds     how long it ran
    stdout      what it wrote; of more than output_bytes, the beginning and the end, with a line between that says so
    truncated   whether stdout or stderr was longer than that
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


class Sandbox:
    """A sandbox that runs. Programs run one after the other; files that they leave are there for the next one,
    processes are not. Calls by several tasks wait for each other. Once a call fails or is cancelled, the sandbox is
    over."""

    def __init__(self, command: Command, limits: schema.Sandbox, python: str, deadline_s: float | None):
        """python: the interpreter of programs. deadline_s: how long the sandbox may live, whatever goes on in it."""
        self._command, self._limits, self.python = command, limits, python
        self._turn, self._is_over = asyncio.Lock(), False
        loop = asyncio.get_running_loop()
        self._deadline = None if deadline_s is None else loop.time() + deadline_s
        self._alarm = None if deadline_s is None else loop.call_later(deadline_s + ANSWER_S, self._end)

    async def start(self) -> Self:
        """Returns when the sandbox is up. Raises SandboxError with what its command says, if it does not come up."""
        ours, theirs = socket.socketpair()
        said, errors = os.pipe()
        os.set_blocking(said, False)
        self._errors = open(said, "rb", buffering=0)  # noqa: SIM115 - closed at the end, or with this object
        try:
            self._process = subprocess.Popen(
                self._command.arguments,
                **dict(stdin=theirs, stdout=theirs, stderr=errors),
                env=dict(self._command.environment),
                pass_fds=self._command.files,
                cwd="/",
                process_group=0,
            )
        except OSError as error:
            ours.close()
            self._errors.close()
            raise SandboxError(f"{self._command.arguments[0]} cannot be started: {error}") from None
        finally:
            theirs.close()
            for file in (errors, *self._command.files):
                os.close(file)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            await self._ask(None, START_S)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def is_over(self) -> bool:
        """Whether the sandbox has ended, or is about to."""
        return self._is_over or self._process.poll() is not None

    @property
    def remaining_s(self) -> float:
        """The seconds until the deadline, at least 0."""
        if self._deadline is None:
            return float("inf")
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def upload(self, name: str, content: bytes | str) -> None:
        """Writes a file, in the folder where programs run or under an absolute path. Raises OSError if there is no
        room for it, or no such place."""
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        [reason] = await self._ask([b"write", name.encode(), data], ANSWER_S)
        if reason:
            raise OSError(f"{name}: {reason.decode(errors='replace')}")

    async def run(
        self, arguments: Sequence[str], stdin: bytes = b"", wall_s: float | None = None, merged: bool = False
    ) -> Finished:
        """Runs a program until all of its processes have ended.

        wall_s   how long it may take, if that is less than sandbox.wall_s
        merged   whether stdout has what goes to stderr, too, in the order in which it was written
        """
        limits, left_s = self._limits, self.remaining_s
        if left_s == 0:
            return Finished(-9, "deadline", 0.0)
        own_s = limits.wall_s if wall_s is None else min(wall_s, limits.wall_s)
        wall_s = min(own_s, left_s)
        numbers = (
            *(max(1, round(wall_s * 1000)), limits.cpu_s, limits.memory_mib, limits.processes, limits.file_mib),
            limits.output_bytes,
        )
        request = [b"run", " ".join(map(str, numbers)).encode(), b"%d" % merged, stdin]
        request += [argument.encode("utf-8", "replace") for argument in arguments]
        status, limit, milliseconds, *outputs = await self._ask(request, wall_s + ANSWER_S)
        if limit == b"wall_s" and wall_s < own_s:
            limit = b"deadline"
        (stdout, less), (stderr, also_less) = (_joined(outputs[i : i + 3]) for i in (0, 3))
        seconds = int(milliseconds) / 1000
        return Finished(int(status), limit.decode() or None, seconds, stdout, stderr, less or also_less)

    async def stop(self) -> None:
        """Ends the sandbox with all that is in it; a call that is under way fails. Returns when nothing is left."""
        self._end()
        async with self._turn:
            await self._wait()

    def _end(self) -> None:
        """Tells the agent to end the sandbox, which it does whatever runs in it."""
        self._is_over = True
        if self._alarm is not None:
            self._alarm.cancel()
        with suppress(OSError, RuntimeError):  # it has ended already
            self._writer.write_eof()

    async def _wait(self) -> None:
        """Waits until the sandbox has ended. The end of its output comes when nobody is left who could write."""
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

    async def _ask(self, request: list[bytes] | None, timeout_s: float) -> list[bytes]:
        """Sends a request, if there is one, and returns the answer."""
        async with self._turn:
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
                raise SandboxError(f"the sandbox did not answer within {timeout_s:g} s") from None
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                self._end()
                said = self._said()
                await self._wait()
                raise SandboxError(f"the sandbox ended (exit status {self._process.returncode}){said}") from None
            except BaseException:  # the next answer would be that to this request
                self._end()
                raise

    def _said(self) -> str:
        """Returns what the sandbox's command has written of its failure."""
        lines = (self._errors.read(ERROR_BYTES) or b"").decode(errors="replace").split("\n")
        text = "; ".join(line.strip() for line in lines[-4:] if line.strip())
        return f": {text}" if text else ""


def _joined(fields: Sequence[Any]) -> tuple[bytes, bool]:
    """Returns an output from its length, its beginning and its end, and whether something is left out."""
    total, head, tail = int(fields[0]), fields[1], fields[2]
    left_out = total - len(head) - len(tail)
    if left_out == 0:
        return head + tail, False
    return b"%b\n[%d bytes are left out here]\n%b" % (head, left_out, tail), True
