"""Ends the run when Ray's own processes die, which the driver would else notice late or never."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import psutil

from megarl.cluster import processes

POLL_S = 1.0
FATAL = ("raylet", "gcs_server")


class Watchdog:
    """Watches the raylet and the GCS from a thread. Their loss cannot be survived, and leaves calls of the driver
    hanging in Ray's core; so the thread says what happened, ends all processes of the run and exits."""

    def __init__(self, ray_folder: Path):
        self._ray_folder = ray_folder
        self._stopped = threading.Event()
        self._watched = [p for p in psutil.Process().children(recursive=True) if p.name() in FATAL]
        assert len(self._watched) == len(FATAL), f"expected {FATAL}, found {[p.name() for p in self._watched]}"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            for process in self._watched:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    self._abort(process.pid)

    def _abort(self, pid: int) -> None:
        print(f"megarl: error: a process of Ray (pid {pid}) died; the run ends", file=sys.stderr, flush=True)
        processes.end_descendants()
        shutil.rmtree(self._ray_folder, ignore_errors=True)
        os._exit(1)
