"""Programs that exceed their limits: each is killed, the machine is unaffected, and the next program runs."""

from __future__ import annotations

import pytest

from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.provider import Provider
from tests.sandboxes import finish, limits, printed
from tests.timing import HANG_S, LIMIT_S, WAIT_S

FORKS = """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""


def bounded(**changed) -> Provider:
    return Bubblewrap(limits(**changed))


def test_endless_programs_are_stopped_at_their_limits():
    finished = finish(bounded(cpu_s=1), "while True: pass")
    assert (finished.limit, finished.succeeded) == ("cpu_s", False)
    finished = finish(bounded(wall_s=0.5), f"import time; time.sleep({HANG_S})")
    assert (finished.limit, finished.status) == ("wall_s", -9)
    assert 0.5 <= finished.seconds < WAIT_S


def test_processes_share_one_cpu_time_limit():
    """Each process on its own stays below the limit."""
    program = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                while time.process_time() < 0.9: pass
                os._exit(0)
        for _ in range(8): os.wait()
        print("all")
    """
    finished = finish(bounded(cpu_s=1), program)
    assert (finished.limit, finished.stdout) == ("cpu_s", b"")


def test_program_that_ignores_sigxcpu_is_killed():
    program = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    finished = finish(bounded(cpu_s=1), program)
    assert (finished.limit, finished.status) == ("cpu_s", -9)


def test_sigxcpu_names_the_cpu_limit_whatever_time_was_counted():
    """The kernel may send the signal early, because it samples CPU times at clock ticks."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)"
    finished = finish(bounded(cpu_s=10), program)
    assert (finished.limit, finished.status) == ("cpu_s", -24)


@pytest.mark.parametrize("drops_root", [None, False], ids=["another user", "as root"])
def test_fork_bomb_is_stopped(drops_root):
    """The kernel does not limit root's processes, so the agent does."""
    provider = Bubblewrap(limits(wall_s=LIMIT_S, cpu_s=1), drops_root=drops_root)
    finished = finish(provider, FORKS)
    assert finished.limit in ("processes", "cpu_s", "wall_s") and finished.seconds < WAIT_S
    assert finish(provider, FORKS, "print('next')").stdout == b"next\n"


def test_threads_count_as_processes():
    program = """
        import threading, time
        threading.stack_size(1 << 16)
        try:
            for _ in range(100): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        except RuntimeError:
            print(threading.active_count())
    """
    assert printed(bounded(processes=8), program) == "8\n"


def test_allocation_above_the_memory_limit_fails():
    finished = finish(bounded(memory_mib=128), "a = bytearray(1 << 30); print('had it')")
    assert finished.status == 1 and finished.stdout == b"" and b"MemoryError" in finished.stderr


def test_processes_share_one_memory_limit():
    program = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                hoard = bytearray(os.urandom(1 << 20)) * 60
                time.sleep(30)
        time.sleep(30)
    """
    finished = finish(bounded(memory_mib=128), program)
    assert finished.limit == "memory_mib" and finished.seconds < WAIT_S


def test_shared_memory_counts_once():
    program = """
        import os, time
        hoard = bytearray(os.urandom(1 << 20)) * 60
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(0.3)
                os._exit(0)
        time.sleep(0.3)
        print("all")
    """
    assert printed(bounded(memory_mib=192), program) == "all\n"


HOLDS = """
    import mmap, os, time
    kept = []
    for _ in range(4):
        if os.fork() == 0:
            try:
                {hold}
            except OSError as error:
                print(error.strerror, flush=True)
                os._exit(1)
            print("held", flush=True)
            time.sleep(30)
    for _ in range(4): os.wait()
"""
"""A program whose four processes each hold 60 MiB, in ways that their own statistics do not show."""


@pytest.mark.parametrize(
    "hold",
    [
        "kept = mmap.mmap(-1, 60 << 20); kept.write(bytes(60 << 20))",
        "kept = mmap.mmap(-1, 60 << 20); kept.write(bytes(60 << 20)); kept.madvise(mmap.MADV_DONTNEED)",
        "kept = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 60 << 20); kept.write(bytes(60 << 20))",
    ],
)
def test_shared_anonymous_memory_is_refused(hold):
    finished = finish(bounded(memory_mib=128), HOLDS.format(hold=hold))
    assert b"held" not in finished.stdout and len(finished.stdout.splitlines()) == 4


def test_memory_of_a_process_that_hides_its_statistics_counts():
    hold = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); kept = bytearray(os.urandom(1 << 20)) * 60"
    assert finish(bounded(memory_mib=128), HOLDS.format(hold=hold)).limit == "memory_mib"


def test_buffers_of_sockets_count():
    program = """
        import socket, time
        kept = []
        for _ in range(100):
            pair = socket.socketpair()
            kept.append(pair)
            for end in pair:
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                try:
                    while True: end.send(bytes(1 << 16))
                except BlockingIOError: pass
        time.sleep(30)
    """
    assert finish(bounded(memory_mib=48, wall_s=20.0), program).limit == "memory_mib"
    assert printed(bounded(), "import asyncio\nasync def main(): print('ran')\nasyncio.run(main())") == "ran\n"


def test_multiprocessing_works():
    program = """
        import multiprocessing as mp
        if __name__ == "__main__":
            with mp.get_context("fork").Pool(2) as pool: print(sum(pool.map(abs, [-1, -2])))
            value = mp.Value("i", 3)
            print(value.value)
    """
    assert printed(bounded(), program) == "3\n3\n"


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_disk_space_is_limited(folder):
    program = f"""
        written = 0
        try:
            for i in range(100):
                with open(f"{folder}/{{i}}", "wb") as file:
                    file.write(bytes(1 << 20))
                written += 1
        except OSError as error:
            print(written, error.strerror)
    """
    assert printed(bounded(file_mib=8), program) == "8 No space left on device\n"


def test_file_size_is_limited():
    program = "import os; f = os.open('a', os.O_CREAT | os.O_WRONLY); os.lseek(f, 1 << 40, 0); os.write(f, b'a')"
    assert finish(bounded(), program).status != 0


def test_number_of_empty_files_is_limited():
    finished = finish(bounded(wall_s=60.0, cpu_s=60), "for i in range(10**9): open(str(i), 'w').close()")
    assert finished.limit == "files"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_keeps_its_beginning_and_end(stream):
    program = f"""
        import sys, time
        end = time.monotonic() + 0.5
        sys.{stream}.write("first")
        while time.monotonic() < end: sys.{stream}.write("a" * 100000)
        sys.{stream}.write("last")
    """
    finished = finish(bounded(), program)
    output = getattr(finished, stream)
    assert finished.status == 0 and finished.truncated
    assert output.startswith(b"firsta") and output.endswith(b"alast") and b" bytes omitted]" in output
    assert len(output) < 10_100


def test_large_input_and_output_are_passed_through():
    data = b"line\n" * 400_000
    program = "import sys; data = sys.stdin.buffer.read(); print(len(data))"
    assert finish(bounded(), program, stdin=data).stdout == b"2000000\n"
    assert finish(bounded(), "print('unread')", stdin=data).stdout == b"unread\n"
    echo = finish(
        bounded(output_bytes=3_000_000), "import shutil, sys; shutil.copyfileobj(sys.stdin, sys.stdout)", stdin=data
    )
    assert echo.stdout == data and not echo.truncated
