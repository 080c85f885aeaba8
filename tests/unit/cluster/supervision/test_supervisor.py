"""`supervised` in a separate program: exit status, stderr and leftovers."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from megarl.cluster.supervision import supervisor
from tests.timing import GRACE_S, SHORT_S, WAIT_S, wait_until

PROGRAM = """
import os, signal, subprocess, sys, time
from megarl.cluster.supervision import interrupts, supervisor, suspension, watchdog
from tests.timing import HANG_S, SHORT_S
suspension.SUSPENDED_S = suspension.POLL_S = SHORT_S
supervisor.DEADLINE_S = {deadline_s}
supervisor.REPEAT_S = interrupts.REPEAT_S = {repeat_s}
parent = os.getpid()

def wait():
    # Sleep in short calls: a signal just before a long sleep would be handled only after it.
    while True:
        time.sleep(0.1)

with supervisor.supervised({grace_s}) as scratch:
    (scratch / "file").touch()
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({{HANG_S}})"], start_new_session=True)
    print(os.getpid(), helper.pid, scratch, flush=True)
    {body}
"""

LATE_WAITPID = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

pid_t waitpid(pid_t pid, int *status, int options) {
    struct timespec left = {1, 0};
    while (nanosleep(&left, &left)) {}  /* a signal interrupts the sleep */
    return syscall(SYS_wait4, pid, status, options, NULL);
}
"""
"""A waitpid that begins one second late."""


@dataclass(frozen=True)
class Program:
    process: subprocess.Popen
    child: int
    helper: int
    scratch: Path

    def end(self) -> tuple[int, str]:
        """Wait until the program and its descendants have exited. Return exit status and stderr."""
        code = self.process.wait(WAIT_S)
        wait_until(lambda: not (_runs(self.child) or _runs(self.helper) or self.scratch.exists()), self.left)
        return code, self.process.stderr.read()

    def left(self) -> list:
        return [_runs(self.child), _runs(self.helper), [*self.scratch.glob("*")], self.process.stderr.read()]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """Restore the default action of signals that are ignored, for example under nohup, because processes inherit it."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@contextmanager
def program(
    body: str, deadline_s: float = GRACE_S, grace_s: float = 0.0, repeat_s: float = supervisor.REPEAT_S
) -> Iterator[Program]:
    code = PROGRAM.format(body=body, deadline_s=deadline_s, grace_s=grace_s, repeat_s=repeat_s)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        # Skip notes about folders of other runs that are being removed at the same time.
        lines = iter(process.stdout.readline, "")
        child, helper, scratch = next(line for line in lines if not line.startswith("megarl: note:")).split()
        try:
            yield Program(process, int(child), int(helper), Path(scratch))
        except BaseException:
            process.kill()  # on exit, Popen waits for the process
            raise


@pytest.mark.parametrize(
    ("body", "code", "last_line"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
    ],
)
def test_parent_exits_with_the_childs_status(body: str, code: int, last_line: str) -> None:
    with program(body) as run:
        status, errors = run.end()
    assert status == code
    assert errors.rpartition("\n")[0].endswith(last_line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_parent_interrupts(number: int) -> None:
    with program("wait()") as run:
        os.kill(run.process.pid, number)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


def test_signal_just_before_waiting_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has received the signal but cannot handle it before the parent calls waitpid."""
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE_WAITPID)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with program("wait()") as run:
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_all_processes_interrupts_once(number: int) -> None:
    """Slurm sends signals in this way."""
    waiting = "try: print('waiting', flush=True); wait()"
    clean_up = "\n    ".join((waiting, "finally: time.sleep(0.5); print('clean', flush=True)"))
    with program(clean_up, repeat_s=WAIT_S) as run:
        assert run.process.stdout.readline() == "waiting\n"
        for _ in range(3):
            os.killpg(run.process.pid, number)
            time.sleep(0.05)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")
        assert run.process.stdout.read() == "clean\n"


def test_signal_during_start_interrupts() -> None:
    with program("signal.signal(signal.SIGTERM, signal.SIG_DFL); print(flush=True); wait()") as run:
        run.process.stdout.readline()
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


def test_repeated_ctrl_c_interrupts_once() -> None:
    waiting = "try: print('waiting', flush=True); wait()"
    clean_up = "\n    ".join((waiting, "finally: time.sleep(0.5); print('clean', flush=True)"))
    with program(clean_up, repeat_s=WAIT_S) as run:
        assert run.process.stdout.readline() == "waiting\n"
        for _ in range(5):
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.05)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")
        assert run.process.stdout.read() == "clean\n"


def test_hanging_child_is_killed() -> None:
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); wait()"
    with program(deaf, deadline_s=SHORT_S) as run:
        run.process.stdout.readline()
        os.kill(run.process.pid, signal.SIGTERM)
        code, errors = run.end()
    assert code == 1
    assert errors == f"megarl: error: the driver process {run.child} was killed by SIGKILL; stopping the run\n"


def test_child_has_the_grace_period_before_the_deadline() -> None:
    late = "\n    ".join(("try: print(flush=True); wait()", "except KeyboardInterrupt: time.sleep(2 * SHORT_S)"))
    with program(late, deadline_s=SHORT_S, grace_s=WAIT_S) as run:
        run.process.stdout.readline()
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        assert run.process.returncode == 0, "it must not be killed"


def test_second_signal_cancels_the_grace_period() -> None:
    deaf = "signal.signal(signal.SIGINT, lambda *_: print('told', flush=True)); print(flush=True); wait()"
    with program(deaf, deadline_s=SHORT_S, grace_s=GRACE_S, repeat_s=0.0) as run:
        run.process.stdout.readline()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.stdout.readline() == "told\n"
        os.kill(run.process.pid, signal.SIGTERM)
        code, errors = run.end()
    assert (code, "was killed by SIGKILL" in errors) == (1, True)


def test_signal_to_the_process_group_spares_descendants() -> None:
    """Otherwise, the signal would kill Ray's processes before the run saves its state."""
    starting = "worker = subprocess.Popen([sys.executable, '-c', f'import time; time.sleep({HANG_S})'])"
    waiting = "try: print(flush=True); wait()"
    looking = "except KeyboardInterrupt: time.sleep(0.5); print(worker.poll(), os.getsid(0) == parent, flush=True)"
    with program("\n    ".join((starting, waiting, looking))) as run:
        run.process.stdout.readline()
        os.killpg(run.process.pid, signal.SIGTERM)
        run.end()
        assert run.process.stdout.read() == "None True\n"


def test_job_control_stops_and_resumes_both_processes() -> None:
    with program("wait()") as run:
        os.kill(run.process.pid, signal.SIGTSTP)
        _wait_for(run, psutil.STATUS_STOPPED)
        os.kill(run.process.pid, signal.SIGCONT)
        _wait_for(run, psutil.STATUS_SLEEPING)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


def _wait_for(run: Program, status: str) -> None:
    wait_until(lambda: {psutil.Process(pid).status() for pid in (run.process.pid, run.child)} == {status})


def test_suspended_driver_and_parent_are_resumed() -> None:
    with program("wait()") as run:
        for pid in (run.child, run.process.pid):
            os.kill(pid, signal.SIGSTOP)
            line = run.process.stdout.readline()
            assert line == f"megarl: note: process {pid} was suspended for 1 s; resuming it\n"
            wait_until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


def test_suspended_ray_process_is_resumed(tmp_path: Path) -> None:
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    starting = f"raylet = subprocess.Popen(['{tmp_path}/raylet', str(HANG_S)]); print(raylet.pid, flush=True)"
    with program("\n    ".join((starting, "helper.send_signal(signal.SIGSTOP)", "wait()"))) as run:
        raylet = int(run.process.stdout.readline())
        os.kill(raylet, signal.SIGSTOP)
        line = run.process.stdout.readline()
        assert line == f"megarl: note: process {raylet} was suspended for 1 s; resuming it\n"
        wait_until(lambda: psutil.Process(raylet).status() == psutil.STATUS_SLEEPING)
        assert psutil.Process(run.helper).status() == psutil.STATUS_STOPPED
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (130, "megarl: error: interrupted; stopping the run\n")


def test_ctrl_c_works_with_tostop_terminals() -> None:
    """The child is in the background. It may still write, and reading only raises an error."""
    reading = "\n    ".join(("try: os.read(0, 1)", "except OSError as error: print('cannot read', flush=True)"))
    body = "\n    ".join((reading, "wait()"))
    pid, terminal = pty.fork()
    if pid == 0:
        settings = termios.tcgetattr(0)
        settings[3] |= termios.TOSTOP
        termios.tcsetattr(0, termios.TCSANOW, settings)
        command = PROGRAM.format(body=body, deadline_s=WAIT_S, grace_s=0.0, repeat_s=supervisor.REPEAT_S)
        os.execv(sys.executable, [sys.executable, "-c", command])
    output = b""
    while b"cannot read" not in output:
        assert select.select([terminal], [], [], WAIT_S)[0], output
        output += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # EIO once every writer has exited
        while part := os.read(terminal, 1000):
            output += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert output.endswith(b"megarl: error: interrupted; stopping the run\r\n")


def test_loss_of_the_child_ends_the_run() -> None:
    with program("wait()") as run:
        os.kill(run.child, signal.SIGSEGV)
        code, errors = run.end()
    assert code == 1
    assert errors == f"megarl: error: the driver process {run.child} was killed by SIGSEGV; stopping the run\n"


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("os._exit(1)", "megarl: error: the driver process was ended by Ray, whose raylet has probably died; stopping"),
        ("sys.exit(1)", ""),
        ("watchdog.explained[0] = 1; os._exit(1)", ""),
    ],
)
def test_exit_without_an_error_is_explained(body: str, errors: str) -> None:
    with program(body) as run:
        code, found = run.end()
    assert (code, found) == (1, f"{errors} the run\n" if errors else "")


@pytest.mark.parametrize("last", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_foreign_shared_memory_is_kept(last: str) -> None:
    foreign, made = (Path("/dev/shm", f"megarl-test-{uuid4().hex}") for _ in range(2))
    foreign.write_bytes(bytes(16))
    opening = f"maps = [mmap.mmap(os.open(p, os.O_RDWR | os.O_CREAT), 16) for p in {[str(foreign), str(made)]}]"
    body = ("import mmap", f"open('{made}', 'wb').truncate(16)", opening, "if os.fork() == 0: wait()", last)
    try:
        with program("\n    ".join(body)) as run:
            run.end()
        assert foreign.exists()
        assert not made.exists()
    finally:
        for path in (foreign, made):
            path.unlink(missing_ok=True)


def test_loss_of_the_parent_ends_the_run() -> None:
    with program("wait()") as run:
        run.process.kill()
        assert run.end() == (-signal.SIGKILL, "megarl: error: interrupted; stopping the run\n")


def test_ignored_sighup_stays_ignored() -> None:
    """The parent ignores the signal from the start, as under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with program("time.sleep(1)") as run:
            os.kill(run.process.pid, signal.SIGHUP)
            assert run.end() == (0, "")
    finally:
        signal.signal(signal.SIGHUP, previous)
