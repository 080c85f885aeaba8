"""Processes that run user code or third-party libraries, which may hang, crash or be killed at any time."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import psutil

from megarl.core import stacks
from megarl.core.text import encodable
from megarl.usercode.parent import SELF_CLEANING

IMPORT_S = 60.0
"""Time limit in seconds for importing one user file."""

STACKS_S = 0.1
"""Seconds that a process has to write its stack traces, about a hundred times as long as it needs."""

EXIT_S = 10.0
"""Seconds that a process has to exit after closing its connection. Python closes the connection first, and on a busy
machine, the exit may take more than a second."""

CLEANUP_S = 20.0
"""Seconds that a self-cleaning program has to exit after the process that started it was killed. The longest grace
period of such a program is the 10 s of verifiers_program."""

KILLING_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

POLL_S = 0.001
READ_BYTES = 65536
MAX_MESSAGE_BYTES = 2**30
"""Maximum length in bytes of a message from a child."""

TOO_LONG = f"sent a message of more than {MAX_MESSAGE_BYTES} bytes"


class ChildFailure(Exception):
    """Raised when a child process fails. The message is its exit status, its signal, or the reason for killing it.
    `timed_out`: whether it exceeded a time limit. `was_killed`: see ChildProcess."""

    def __init__(self, reason: str, timed_out: bool = False, was_killed: bool = False):
        super().__init__(reason)
        self.timed_out, self.was_killed = timed_out, was_killed

    def with_limit(self, key: str, memory_mib: int | None) -> str:
        """Return the message. If a signal ended the process, append the memory limit in `key`, because a process that
        reaches the limit may crash."""
        return f"{self}, {key}={memory_mib}" if str(self).startswith("SIG") and memory_mib is not None else str(self)

    def import_error(self, name: str, limit_s: float | None, remedy: str = "") -> str:
        """Return the message for a user file that the process could not import within a time limit, if any."""
        if self.timed_out:
            cause, fix = f"did not finish within {limit_s:g} s", f"move slow work out of the file's top level{remedy}"
        else:
            cause = f"ended the process ({self})"
            fix = "make the file import without exiting (its output is in this process's log)"
        return f"{name}: the import {cause}. Fix: {fix}"


class ChildProcess:
    """A program in its own process group, with a connection to this process.

    The child sends JSON objects, one per line, because user code and the policy's output may influence what it sends.
    Messages to the child may have any format. The program uses `megarl.usercode.parent`. It reads an empty stdin, and
    its stdout goes to stderr, so that printed text is not mistaken for a message.

    The process is killed with its descendants before a method raises ChildFailure. The kernel kills it when the thread
    that created it exits, so it does not outlive this process, and the thread must live as long as the child.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        log: BinaryIO | None = None,
        is_self_cleaning: bool = False,
    ):
        """Start the program.

        Args:
            command: command line without its last argument, the file descriptor of the connection.
            log: file for the program's output. None: this process's stderr.
            is_self_cleaning: whether the program stops its own processes and exits once its connection closes. Such a
                program survives this process and runs in its own session.
        """
        self.kill_reason: str | None = None
        self._killing, self._unread = threading.Lock(), b""
        self._socket, remote = socket.socketpair()
        environment = {name: value for name, value in environment.items() if name != SELF_CLEANING}
        with remote:
            self._process = subprocess.Popen(
                [*command, str(remote.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=log,
                pass_fds=[remote.fileno()],
                env=environment | ({SELF_CLEANING: "1"} if is_self_cleaning else {}),
                start_new_session=is_self_cleaning,
                process_group=None if is_self_cleaning else 0,
            )

    @property
    def pid(self) -> int:
        """The id of the process and of its process group."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        # WNOWAIT leaves a zombie until `kill`, so that no other process group receives this id.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # another thread has reaped the process
            return self._process.returncode is not None or os.waitid(os.P_PID, self.pid, options) is not None
        return True

    def call(self, request: bytes, timeout_s: float, number: int | None = None) -> dict[str, Any]:
        """Send a request and return the reply without its `id`, which is `number`. Messages with a different id
        are dropped, because user code in the child may have sent them. timeout_s limits the total time."""
        deadline = time.monotonic() + timeout_s
        self.send(request, timeout_s)
        while (reply := self.receive(deadline - time.monotonic())).pop("id", None) != number:
            pass
        return reply

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(message)
        except OSError as error:
            raise self._failure(error) from None

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the next message and return it."""
        try:
            return parse(self._read_line(None if timeout_s is None else time.monotonic() + timeout_s))
        except (OSError, EOFError, ValueError) as error:
            raise self._failure(error) from None

    def _read_line(self, deadline: float | None) -> bytes:
        data = bytearray(self._unread)
        chunk = self._unread
        while b"\n" not in chunk:
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining_s)
            chunk = self._socket.recv(READ_BYTES)
            data += chunk
            if not chunk:
                raise EOFError
            if len(data) > MAX_MESSAGE_BYTES:
                raise ValueError(TOO_LONG)
        line, _, self._unread = bytes(data).partition(b"\n")
        return line

    def _failure(self, error: Exception) -> ChildFailure:
        """Kill the process and return the failure to raise. `error` is the exception that its connection raised."""
        if isinstance(error, TimeoutError) and self.is_suspended:
            self.kill()
        elif isinstance(error, TimeoutError):
            self.show_stacks()
            self.kill("exceeded its time limit")
        elif isinstance(error, ValueError):
            self.kill(str(error))
        deadline = time.monotonic() + EXIT_S
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill(None if self.has_ended else "closed its connection")
        return ChildFailure(self.status, isinstance(error, TimeoutError) and not self.was_killed, self.was_killed)

    @property
    def was_killed(self) -> bool:
        """Whether an external signal killed the process, such as SIGKILL when the node ran out of memory, or suspended
        it until it exceeded a time limit. Signals that crash a process, such as SIGSEGV, do not count."""
        code = self._process.returncode
        return self.kill_reason is None and code is not None and -code in KILLING_SIGNALS

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has suspended the process."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def status(self) -> str:
        """How the process ended, after `kill`: the reason for killing it, its exit status, or the signal's name."""
        code, names = self._process.returncode, {number.value: number.name for number in signal.Signals}
        return self.kill_reason or (f"exit status {code}" if code >= 0 else names.get(-code, f"signal {-code}"))

    def limit_memory(self, mib: int) -> None:
        """Limit the address space of the child, and of each of its new descendants, to the child's current size plus
        `mib` MiB."""
        with suppress(psutil.NoSuchProcess):  # `kill` has reaped the process
            process = psutil.Process(self.pid)
            limit, (_, hard) = process.memory_info().vms + mib * 2**20, process.rlimit(psutil.RLIMIT_AS)
            process.rlimit(psutil.RLIMIT_AS, (limit if hard == psutil.RLIM_INFINITY else min(limit, hard), hard))

    def show_stacks(self) -> None:
        """Make the process write its stack traces to stderr."""
        with self._killing:
            if self.has_ended:
                return
            os.kill(self.pid, stacks.SIGNAL)
        time.sleep(STACKS_S)

    def kill(self, reason: str | None = None) -> None:
        """Kill the process with its descendants. Self-cleaning programs and their descendants first have CLEANUP_S to
        exit, but not longer, because user code can also mark its programs as self-cleaning. A call that another thread
        is waiting for fails with `reason`."""
        with self._killing:
            self.kill_reason = self.kill_reason or reason
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGSTOP)  # a suspended process cannot start others
                descendants = psutil.Process(self.pid).children(recursive=True)  # lists parents before their children
                os.killpg(self.pid, signal.SIGKILL)
                spared: dict[int, psutil.Process] = {}
                for process in descendants:
                    with suppress(psutil.Error):  # the descendant has exited or belongs to another user
                        if process.ppid() in spared or SELF_CLEANING in process.environ():
                            spared[process.pid] = process
                        else:
                            process.kill()
                self._process.wait()
                if spared:
                    threading.Thread(target=_kill_remaining, args=(list(spared.values()),), daemon=True).start()
        with suppress(OSError):  # the socket is already closed
            self._socket.shutdown(socket.SHUT_RDWR)  # a detached process may still hold the other end
        self._socket.close()


class ConcurrentChild(ChildProcess):
    """A child process that handles many requests at once, for asyncio. Messages in both directions are JSON lines, and
    each reply has the `id` of its request. `open` must be the first call. All other calls must run in the same event
    loop."""

    async def open(self, arguments: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send the program's arguments and return its first message."""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._was_suspended = False
        connection = socket.socket(fileno=self._socket.detach())
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
        try:
            async with asyncio.timeout(timeout_s):
                await self.post(arguments)
                hello = await self._receive()
        except (OSError, EOFError, ValueError) as error:
            raise await self._disconnect(error) from None
        self._reading = asyncio.create_task(self._read_replies())
        return hello

    @property
    def is_over(self) -> bool:
        return self._reading.done() or self.has_ended

    async def request(self, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request and return the reply. After a timeout, the process continues to run, unless it was
        suspended."""
        if self._reading.done():
            raise ChildFailure(self.status, was_killed=self.was_killed)
        number = new_number()
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self.post({"id": number, **fields})
                return await reply
        except TimeoutError:
            self._was_suspended = self._was_suspended or self.is_suspended
            if self._was_suspended:  # another request's timeout may have killed the process
                await asyncio.to_thread(self.kill)
                raise ChildFailure(self.status, was_killed=self.was_killed) from None
            raise ChildFailure("exceeded its time limit", timed_out=True) from None
        finally:
            del self._waiting[number]

    async def post(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting for a reply."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        with suppress(ConnectionError):  # the process has exited, which `_read_replies` reports
            await self._writer.drain()

    async def _receive(self) -> dict[str, Any]:
        try:
            return parse(await self._reader.readuntil())
        except asyncio.LimitOverrunError:
            raise ValueError(TOO_LONG) from None

    async def _read_replies(self) -> None:
        try:
            while True:
                message = await self._receive()
                reply = self._waiting.get(message.get("id", -1))
                if reply is not None and not reply.done():
                    reply.set_result(message)
        except (OSError, EOFError, ValueError) as error:
            failure = await self._disconnect(error)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(failure)

    async def _disconnect(self, error: Exception) -> ChildFailure:
        failure = await asyncio.to_thread(self._failure, error)
        self._writer.transport.abort()
        return failure

    async def end(self) -> None:
        """Kill the process with its descendants."""
        await asyncio.to_thread(self.kill)
        self._writer.transport.abort()


def _kill_remaining(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes that are still running after CLEANUP_S, with their descendants."""
    _, remaining = psutil.wait_procs(processes, timeout=CLEANUP_S)
    for process in remaining:
        with suppress(psutil.Error):
            for descendant in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error):
                    descendant.kill()


def group_sizes() -> Counter[int]:
    """Return the number of processes in each process group on this machine."""
    sizes = Counter[int]()
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            sizes[os.getpgid(pid)] += 1
    return sizes


def new_number() -> int:
    """Return a random id for a request, so that user code in the child cannot reply to other requests."""
    return secrets.randbits(62)


def parse(line: bytes) -> dict[str, Any]:
    """Decode a message and replace lone surrogates in it. Raise ValueError if it is not a JSON object."""
    try:
        message = encodable(json.loads(line))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("id"), int | None):
        raise ValueError("sent a message that is not a JSON object")
    return message
