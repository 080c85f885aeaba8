"""Resumes processes that were suspended by mistake. A suspended driver cannot time out, so the run would hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import psutil

SUSPENDED_S = 10.0
"""Time in seconds before a suspended process is resumed. Job control is not affected, because it also suspends the
process that would resume the others. Ray's health checks take longer (see session.HEALTH_CHECKS)."""

POLL_S = 2.0


class Resumer:
    """Resumes processes that stay suspended."""

    def __init__(self, find: Callable[[], Iterable[int]]):
        """find: returns the ids of the processes to watch."""
        self._find = find
        self._since: dict[int, float] = {}

    def check(self) -> None:
        """Resume processes that every call in the last SUSPENDED_S seconds found suspended."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in self._find() if _is_suspended(pid)}
        for pid in [pid for pid, since in self._since.items() if now - since >= SUSPENDED_S]:
            with suppress(ProcessLookupError, PermissionError):
                print(f"megarl: note: process {pid} was suspended for {SUSPENDED_S:g} s; resuming it", flush=True)
                os.kill(pid, signal.SIGCONT)
            del self._since[pid]

    def start(self) -> None:
        """Check in a thread until this process exits."""
        threading.Thread(target=self._check_repeatedly, name="resumer", daemon=True).start()

    def _check_repeatedly(self) -> None:
        while True:
            time.sleep(POLL_S)
            self.check()


def named(pids: Iterable[int], names: Collection[str]) -> list[int]:
    """Return the ids of the processes with these names."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):  # the process has exited or is not readable
            if psutil.Process(pid).name() in names:
                found.append(pid)
    return found


def _is_suspended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
