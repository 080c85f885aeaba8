"""Runs a function in a forked process that can be killed, because signals cannot interrupt all code.

A fork shares the modules that are already imported, such as SymPy. A `ChildProcess` would import them again for each
comparison. The functions do not start processes.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable

import psutil

from megarl.usercode.child_process import KILLING_SIGNALS
from megarl.usercode.failures import RESTARTS, ProcessLost

MAX_BYTES = 64
"""Maximum length of a result in bytes."""

CHILD_BYTES = 2**31
"""Maximum number of bytes that the forked process may allocate."""


def in_child(function: Callable[[], float], timeout_s: float) -> float:
    """Run a function in a forked process and return its result. Raise TimeoutError if the process fails, times out or
    exceeds CHILD_BYTES, and ProcessLost if it is killed RESTARTS + 1 times."""
    for _ in range(RESTARTS + 1):
        result, was_killed = _try_in_child(function, timeout_s)
        if result:
            return float(result)
        if not was_killed:
            raise TimeoutError("the comparison failed or ran out of time")
    raise ProcessLost(f"the comparison's process was killed in each of {RESTARTS + 1} attempts")


def _try_in_child(function: Callable[[], float], timeout_s: float) -> tuple[bytes, bool]:
    """Run a function in a forked process. Return its result or b"", and whether the process was killed from outside."""
    read, write = os.pipe()
    ready: list[int] = []
    limits = _memory_limits()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            os.write(write, repr(float(function())).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready = select.select([read], [], [], timeout_s)[0]
        result = os.read(read, MAX_BYTES) if ready else b""
    finally:
        os.close(read)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return result, bool(ready) and os.WIFSIGNALED(status) and os.WTERMSIG(status) in KILLING_SIGNALS


def _memory_limits() -> tuple[int, int]:
    """Return the limits of a forked process's address space. A response that needs more memory counts as wrong, and the
    limit keeps the kernel from killing the process."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + CHILD_BYTES
    return min([limit, *(each for each in limits if each != resource.RLIM_INFINITY)]), limits[1]
