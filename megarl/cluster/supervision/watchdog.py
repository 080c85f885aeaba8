"""The watchdog, which ends the run when Ray's own processes die: the driver would notice that late or never."""

from __future__ import annotations

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
"""The time in which the driver hears of a signal that has ended them, where all processes of the run got it."""
FATAL = ("raylet", "gcs_server")


class Watchdog:
    """A thread that watches the raylet and the GCS. Their loss cannot be survived, and leaves calls of the driver
    hanging in Ray's core; so the thread says what happened and exits, and the parent process ends the others."""

    def __init__(self) -> None:
        self.phase = "Ray start"
        """The wait of the driver, to be named with the loss."""
        self._stopped = False
        self._lock = threading.Lock()
        self._watched = _find(FATAL)
        assert len(self._watched) == len(FATAL), f"expected {FATAL}, found {list(self._watched)}"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def check(self) -> None:
        """End this process if one of Ray's is lost. It is called, too, where an error may be a consequence of that."""
        lost = [name for name, process in self._watched.items() if not _runs(process)]
        if lost and not self._stopped:
            time.sleep(SIGNAL_S)
            if interrupts.is_told:
                interrupts.expire()  # the signal has ended them, too: there is nothing to wait for
                return
            with self._lock:
                if not self._stopped:
                    line = f"megarl: error: {self.phase}: Ray's {lost[0]} died; the run ends"
                    print(line, file=sys.stderr, flush=True)
                    os._exit(1)

    def stop(self) -> None:
        """Let Ray's processes end from now on."""
        with self._lock:
            self._stopped = True

    def _watch(self) -> None:
        while not self._stopped:
            self.check()
            time.sleep(POLL_S)


def _find(names: Collection[str]) -> dict[str, psutil.Process]:
    """Return the descendants of this process that have these names."""
    found = {}
    for pid in descendants():
        with suppress(psutil.Error):  # it has ended, or may not be read
            process = psutil.Process(pid)
            if process.name() in names:
                found[process.name()] = process
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
