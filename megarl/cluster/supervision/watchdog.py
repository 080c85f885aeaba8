"""The watchdog stops the run when Ray's own processes die. Without it, the driver would notice late or never."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

from megarl.cluster.supervision.interrupts import interrupts
from megarl.cluster.supervision.processes import descendants

POLL_S = 1.0
SIGNAL_S = 1.0
"""Seconds to wait for a signal after Ray's processes have exited: the signal that killed them may also reach the
driver."""
FATAL = ("raylet", "gcs_server")

explained = mmap.mmap(-1, 1)
"""One byte of memory that the driver shares with its parent: nonzero once the driver has printed an error or ended by
itself. Ray's core exits the driver with status 1, without a message, if a call fails because the raylet has died."""


class Watchdog:
    """A thread that watches the raylet and the GCS. A run cannot survive the loss of either process, and the driver's
    calls may hang in Ray's core. The thread therefore prints an error and terminates the driver. The parent process
    then terminates all remaining processes."""

    def __init__(self) -> None:
        self.phase = "Ray start"
        """Description of what the driver currently waits for, used in the error message."""
        self._stopped = False
        self._lock = threading.Lock()
        self._watched = _find(FATAL)
        assert len(self._watched) == len(FATAL), f"expected {FATAL}, found {list(self._watched)}"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def check(self) -> None:
        """Exit this process if a Ray process is lost. Call this after errors that such a loss may have caused."""
        lost = [name for name, process in self._watched.items() if not _runs(process)]
        if lost and not self._stopped:
            time.sleep(SIGNAL_S)
            if interrupts.is_signaled:
                interrupts.expire()  # the signal has also killed Ray, so nothing can be saved
                return
            with self._lock:
                if not self._stopped:
                    explained[0] = 1
                    line = f"megarl: error: {self.phase}: Ray's {lost[0]} died; stopping the run"
                    print(line, file=sys.stderr, flush=True)
                    os._exit(1)

    def stop(self) -> None:
        """Stop watching, because Ray is about to shut down."""
        with self._lock:
            self._stopped = True

    def _watch(self) -> None:
        while not self._stopped:
            self.check()
            time.sleep(POLL_S)


def _find(names: Collection[str]) -> dict[str, psutil.Process]:
    """Return the descendants of this process with these names."""
    processes = {}
    for pid in descendants():
        with suppress(psutil.Error):  # the process has exited or is not readable
            process = psutil.Process(pid)
            if process.name() in names:
                processes[process.name()] = process
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # the process exited between the two calls
        return False
