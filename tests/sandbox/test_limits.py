"""Programs that take more than they may: each is ended, the machine is as it was, and the next one runs."""

from __future__ import annotations

import pytest

from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.provider import Provider
from tests.sandboxes import finish, limits, printed
from tests.timing import HANG_S, WAIT_S

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


def test_a_loop_without_an_end_comes_to_its_limit():
    finished = finish(bounded(cpu_s=1), "while True: pass")
    assert (finished.limit, finished.succeeded) == ("cpu_s", False)
    finished = finish(bounded(wall_s=0.5), f"import time; time.sleep({HANG_S})")
    assert (finished.limit, finished.status) == ("wall_s", -9)
    assert 0.5 <= finished.seconds < WAIT_S


def test_processes_together_have_the_cpu_time_of_one():
    """Each of them stays below it."""
    program = """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                end = time.process_time() + 0.5
                while time.process_time() < end: pass
                os._exit(0)
        for _ in range(3): os.wait()
        print("all")
    """
    finished = finish(bounded(cpu_s=1), program)
    assert (finished.limit, finished.stdout) == ("cpu_s", b"")


def test_who_ignores_the_signal_is_ended_too():
    program = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    finished = finish(bounded(cpu_s=1), program)
    assert (finished.limit, finished.status) == ("cpu_s", -9)


@pytest.mark.parametrize("drops_root", [None, False], ids=["another user", "as root"])
def test_a_fork_bomb_is_defused(drops_root):
    """The kernel does not count root's processes: then the agent does."""
    provider = Bubblewrap(limits(wall_s=2.0, cpu_s=1), drops_root=drops_root)
    finished = finish(provider, FORKS)
    assert finished.limit in ("processes", "cpu_s", "wall_s") and finished.seconds < WAIT_S
    assert finish(provider, FORKS, "print('next')").stdout == b"next\n"


def test_threads_count():
    program = """
        import threading, time
        threading.stack_size(1 << 16)
        try:
            for _ in range(100): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        except RuntimeError:
            print(threading.active_count())
    """
    assert printed(bounded(processes=8), program) == "8\n"


def test_a_process_that_hoards_memory_is_refused_more():
    finished = finish(bounded(memory_mib=128), "a = bytearray(1 << 30); print('had it')")
    assert finished.status == 1 and finished.stdout == b"" and b"MemoryError" in finished.stderr


def test_processes_together_have_the_memory_of_one():
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


def test_memory_that_processes_share_counts_once():
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


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_a_disk_is_full_before_the_machines_is(folder):
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


def test_a_file_is_no_larger_than_all_may_be():
    program = "import os; f = os.open('a', os.O_CREAT | os.O_WRONLY); os.lseek(f, 1 << 40, 0); os.write(f, b'a')"
    assert finish(bounded(), program).status != 0


def test_files_without_content_are_counted():
    finished = finish(bounded(wall_s=60.0, cpu_s=60), "for i in range(10**9): open(str(i), 'w').close()")
    assert finished.limit == "files"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_of_an_output_without_an_end_the_beginning_and_the_end_are_kept(stream):
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
    assert output.startswith(b"firsta") and output.endswith(b"alast") and b" bytes are left out here]" in output
    assert len(output) < 10_100


def test_input_and_output_of_any_size_pass():
    data = b"line\n" * 400_000
    program = "import sys; data = sys.stdin.buffer.read(); print(len(data))"
    assert finish(bounded(), program, stdin=data).stdout == b"2000000\n"
    assert finish(bounded(), "print('unread')", stdin=data).stdout == b"unread\n"
    echo = finish(
        bounded(output_bytes=3_000_000), "import shutil, sys; shutil.copyfileobj(sys.stdin, sys.stdout)", stdin=data
    )
    assert echo.stdout == data and not echo.truncated
