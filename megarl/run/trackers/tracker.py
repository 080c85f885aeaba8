"""A tracker as the run sees it: rows are put into a queue, and nothing of what becomes of them comes back.

A thread hands the rows on to a process in which the tracker's library runs, and waits for each answer, up to a
deadline. A library that raises loses this row; a process that does not answer, or ends, is ended and started again
with a later row. What is lost is said once, and counted at the end: metrics.jsonl has all of it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.run.folder import RunFolder
from megarl.run.trackers.backends import PACKAGES, Settings

QUEUED_ROWS = 64
"""The rows that wait for a slow tracker; of more, the newest are lost."""

RESTART_S = 60.0
"""The time from the end of a process that hung or died to the start of another."""

INTERRUPTED_S = 3.0
"""The time for the ends of all trackers where the run ends early: a signal leaves little."""

Row = tuple[int, dict[str, float]]


class Tracker:
    """A sink of metrics that never waits and never raises."""

    def __init__(self, settings: Settings, log: Path, timeout_s: float, restart_s: float = RESTART_S):
        """log: the file of what the process prints."""
        self._settings, self._log, self._timeout_s, self._restart_s = settings, log, timeout_s, restart_s
        self._queue: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._starts_at = 0.0
        """The time before which no process is started."""
        self._num_rows = self._num_taken = 0
        self._has_warned = False
        self._is_over = False
        """Whether the rows that wait are lost."""
        self._thread = threading.Thread(target=self._serve, name=f"tracker {settings.tracker}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put a step's metrics into the queue, without NaN and infinities, which not all trackers know."""
        self._num_rows += 1
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if self._queue.qsize() < QUEUED_ROWS:
            self._queue.put((step, finite))
        else:
            self._warn(f"it is {QUEUED_ROWS} steps behind")

    def begin_close(self) -> None:
        """Let the tracker end behind the rows that wait."""
        self._queue.put(None)

    def end(self, deadline: float) -> None:
        """Wait for its end until the deadline, and ends its process then. Says how many rows are lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_over = True
            self._warn("it did not come to its end in time")
        self._end_process()
        if num_lost := self._num_rows - self._num_taken:
            print(
                f"tracker {self._settings.tracker}: lacks {num_lost} of {self._num_rows} steps; metrics.jsonl has all",
                flush=True,
            )

    def _serve(self) -> None:
        self._attempt({"open": asdict(self._settings)})
        while not self._is_over and (row := self._queue.get()) is not None:
            self._num_taken += self._attempt({"write": row})
        if self._process is not None:
            self._attempt({"close": True})

    def _attempt(self, request: Mapping[str, Any]) -> bool:
        """Make a request of the process, which is started where there is none. Return whether it was granted."""
        try:
            if self._process is None:
                if time.monotonic() < self._starts_at:
                    return False
                self._start_process()
                if "open" not in request:
                    request = {"open": asdict(self._settings), **request}
            reason = self._ask(request)
        except TimeoutError:
            reason = f"no answer in {self._timeout_s:g} s (trackers.timeout_s)"
            self._end_process()
        except (OSError, EOFError) as error:
            reason = f"its process has ended ({error})" if str(error) else "its process has ended"
            self._end_process()
        if reason:
            self._warn(reason)
        return not reason

    def _start_process(self) -> None:
        own, other = socket.socketpair()
        with other, self._log.open("ab") as log:
            # A process group of its own: a signal to the run's does not end it before its last rows are written.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.run.trackers.process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other.fileno()],
                process_group=0,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self._connection = own

    def _ask(self, request: Mapping[str, Any]) -> str:
        """Return the answer, which is empty if all went well."""
        connection, deadline = self._connection, time.monotonic() + self._timeout_s
        connection.settimeout(self._timeout_s)
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(65536)
            if not part:
                raise EOFError
            answer += part
        return answer.decode(errors="replace").strip()

    def _end_process(self) -> None:
        self._starts_at = time.monotonic() + self._restart_s
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is None:
            return
        connection.close()
        if process.poll() is None:
            process.kill()
            process.wait()

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(
                f"megarl: warning: tracker {self._settings.tracker}: {reason}; the run goes on, and what it cannot "
                f"take in is left out there (see {self._log})",
                file=sys.stderr,
                flush=True,
            )


def check_trackers(config: Config) -> None:
    """Raise UserError with a line for each tracker of the config that is not installed."""
    missing = [name for name in config.run.trackers if find_spec(name) is None]
    if missing:
        listed = ", ".join(config.run.trackers)
        raise UserError(
            "\n".join(
                f"run.trackers=[{listed}]: {name} is not installed; pip install {PACKAGES[name]}, or leave it out"
                for name in missing
            )
        )


@contextmanager
def open_trackers(config: Config, folder: RunFolder, step: int) -> Iterator[list[Tracker]]:
    """Yield the trackers of a run, and ends them with it, all within trackers.timeout_s. step: the one after which the
    run goes on."""
    timeout_s = config.trackers.timeout_s
    trackers = [
        Tracker(_settings(config, folder, name, step), folder.logs / f"tracker_{name}.log", timeout_s)
        for name in config.run.trackers
    ]
    try:
        yield trackers
    except BaseException:
        end_all(trackers, min(timeout_s, INTERRUPTED_S))
        raise
    end_all(trackers, timeout_s)


def end_all(trackers: Iterable[Tracker], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for tracker in trackers:
        tracker.begin_close()
    for tracker in trackers:
        tracker.end(deadline)


def _settings(config: Config, folder: RunFolder, name: str, step: int) -> Settings:
    own = folder.path / "trackers" / name
    own.mkdir(parents=True, exist_ok=True)
    return Settings(name, config.run.name, str(own), step, config.model_dump(mode="json"))
