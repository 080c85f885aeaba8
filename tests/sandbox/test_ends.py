"""Sandboxes leave no process, file or mount behind, no matter how they end or who terminates them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from megarl.sandbox.agent import PR_SET_CHILD_SUBREAPER
from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Command, SandboxError
from tests.children import matching
from tests.paths import ROOT
from tests.sandboxes import finish, limits
from tests.timing import HANG_S, POLL_S, SHORT_S, WAIT_S, wait_until

MARK = "seconds-of-a-daemon"

DAEMON = f"""
    import os, signal, subprocess, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            for end in range(3):
                os.close(end)
            os.execvp("sleep", ["{MARK}", "600"])
        os._exit(0)
    os.wait()
    print("daemon")
"""
"""A program that leaves a daemon behind, which has its own session and no open pipes, and ignores signals."""


@pytest.fixture(scope="module", autouse=True)
def adopts_orphans() -> None:
    """Make orphaned descendants children of this process, so that the tests find them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def sandbox_processes() -> set[psutil.Process]:
    """Return all sandbox processes that descend from this process."""
    return set(matching(psutil.Process().children(recursive=True), is_of_a_sandbox))


def is_of_a_sandbox(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())  # empty for a zombie
    return (process.name() == "bwrap" and bool(line)) or MARK in line or "megarl sandbox agent" in line


def is_running(argument: str) -> bool:
    """Return whether a program with this command-line argument descends from this process."""
    return bool(matching(psutil.Process().children(recursive=True), lambda process: argument in process.cmdline()))


async def started(argument: str) -> None:
    while not is_running(argument):
        await asyncio.sleep(POLL_S)


@contextmanager
def nothing_left(within_s: float = 0.0) -> Iterator[None]:
    """Assert that the body leaves no sandbox process, open file or zombie behind.

    With `within_s`, they may take that long to exit, and orphaned processes may become zombies.
    """
    before, files, others = sandbox_processes(), open_files(), {child.pid for child in psutil.Process().children()}
    yield
    wait_until(lambda: sandbox_processes() <= before, lambda: sandbox_processes() - before, within_s)
    assert open_files() == files
    if within_s == 0:
        wait_until(lambda: zombies() <= others)  # asyncio's thread may notice late that a process has exited
    for pid in zombies() - others:
        os.waitpid(pid, 0)


def zombies() -> set[int]:
    """Return the ids of this process's zombie children.

    Other tests, such as those of process pools, may have left children that exit later.
    """
    return {
        child.pid
        for child in matching(psutil.Process().children(), lambda child: child.status() == psutil.STATUS_ZOMBIE)
    }


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_daemon_is_killed_with_its_program(provider):
    with nothing_left():
        alive = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
        finished = finish(provider, DAEMON, alive)
        assert finished.stdout == b"2\n"  # the output is the number of processes: the agent and this program
        assert finish(provider, DAEMON).stdout == b"daemon\n"


def test_zombies_are_reaped_with_their_program(provider):
    program = """
        import os
        for _ in range(8):
            if os.fork() == 0:
                if os.fork() == 0: os._exit(0)
                os._exit(0)
        import time; time.sleep(0.2)
    """
    with nothing_left():
        assert finish(provider, program, "print('next')").stdout == b"next\n"


def test_stopping_a_busy_sandbox_leaves_nothing(provider):
    async def stop_while_running() -> None:
        sandbox = await provider.start()
        program = f"open('a', 'w'); import time; time.sleep({HANG_S})"
        call = asyncio.create_task(sandbox.run([provider.python, "-c", program]))
        await asyncio.wait_for(started(program), WAIT_S)
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await call
        with pytest.raises(SandboxError):
            await sandbox.run(["true"])

    with nothing_left():
        asyncio.run(stop_while_running())


def test_canceled_call_ends_its_sandbox(provider):
    async def cancel() -> None:
        sandbox = await provider.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.run(["sleep", "600"])
        assert sandbox.is_over
        await sandbox.stop()

    with nothing_left():
        asyncio.run(cancel())


def test_unstopped_sandbox_ends_with_its_event_loop(provider):
    async def forget() -> None:
        await provider.start()

    with nothing_left(within_s=WAIT_S), warnings.catch_warnings(action="ignore"):
        asyncio.run(forget())
        gc.collect()


def test_program_is_stopped_at_the_sandbox_deadline(provider):
    async def run() -> list[str | None]:
        async with await provider.start(deadline_s=WAIT_S) as sandbox:
            limits = [(await sandbox.run(["true"])).limit]
            sandbox._deadline = asyncio.get_running_loop().time() + SHORT_S
            limits += [(await sandbox.run(["sleep", str(HANG_S)])).limit, (await sandbox.run(["true"])).limit]
            assert sandbox.remaining_s == 0
            return limits

    with nothing_left():
        assert asyncio.run(run()) == [None, "deadline", "deadline"]


BUSY = "while True: pass"

PARENT = f"""
import asyncio, sys
from megarl.sandbox.choice import find_provider
from tests.sandboxes import limits

async def main():
    provider = await find_provider(limits(wall_s=600.0, cpu_s=600))
    sandboxes = [await provider.start() for _ in range(3)]
    busy = [
        sandboxes[0].run([provider.python, "-c", sys.argv[1]]),
        sandboxes[1].run([provider.python, "-c", "{BUSY}"]),
    ]
    await asyncio.gather(*busy)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_nothing(provider, number):
    daemon = "\n".join(line[4:] for line in DAEMON.splitlines()) + "\ntime.sleep(600)\n"
    with nothing_left(within_s=WAIT_S):
        before = sandbox_processes()
        with subprocess.Popen([sys.executable, "-c", PARENT, daemon], cwd=ROOT) as parent:
            wait_until(lambda: is_running(MARK) and is_running(BUSY))
            assert len(sandbox_processes() - before) >= 6
            parent.send_signal(number)


def test_sandbox_killed_from_outside_fails(provider):
    async def run() -> None:
        async with await provider.start() as sandbox:
            call = asyncio.create_task(sandbox.run(["sleep", str(HANG_S)]))
            await asyncio.wait_for(started(str(HANG_S)), WAIT_S)
            os.killpg(sandbox._process.pid, signal.SIGKILL)
            with pytest.raises(SandboxError, match=r"^the sandbox exited with status -9"):
                await call

    with nothing_left(within_s=WAIT_S):
        asyncio.run(run())


def test_hundred_sandboxes_run_in_one_event_loop(provider):
    async def use(i: int) -> str:
        async with await provider.start() as sandbox:
            await sandbox.upload("number", str(i))
            await asyncio.sleep(0.5)
            return (await sandbox.run(["cat", "number"])).stdout.decode()

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(use(i) for i in range(100)))

    with nothing_left():
        assert asyncio.run(all_of_them()) == [str(i) for i in range(100)]


def test_failed_start_reports_the_error_output(monkeypatch):
    class Broken(Provider):
        name = "broken"

        def command(self):
            return Command(["/bin/sh", "-c", "echo no such namespace >&2; exit 3"])

    with nothing_left(), pytest.raises(SandboxError, match=r"exited with status 3: no such namespace$"):
        asyncio.run(Broken(limits()).start())
