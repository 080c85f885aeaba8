"""The run's interface to a tracker. Metrics are queued, and tracker errors never affect the run.

A thread forwards rows to the process that runs the tracker's library, and waits for each reply until a deadline. If the
library raises an error, the row is lost. If the process hangs or dies, it is killed and restarted for a later row. The
first lost row causes a warning, and the total is printed when the tracker is closed. metrics.jsonl always contains all
rows.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.core.credentials import redacted
from megarl.core.errors import UserError
from megarl.core.interpreter import PYTHON
from megarl.run.folder import RunFolder
from megarl.run.trackers.backends import PACKAGES, Settings
from megarl.usercode.child_process import ChildFailure, ChildProcess

QUEUED_ROWS = 64
"""Maximum number of rows in the queue of a slow tracker. Additional rows are lost."""

RESTART_S = 60.0
"""Seconds to wait before restarting a process that has hung or died."""

INTERRUPTED_S = 3.0
"""Timeout in seconds for closing all trackers after an early end. A signal, for example, leaves little time."""

Row = tuple[int, dict[str, float]]

ImagesOf = Callable[[int], Mapping[str, Path]]


class Tracker:
    """A metrics sink that never blocks and never raises."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        timeout_s: float,
        restart_s: float = RESTART_S,
        images_of: ImagesOf = lambda _: {},
    ):
        """Start a thread that serves the queue.

        Args:
            log: file for the output of the tracker's process.
            timeout_s: time limit for a request to the process, in seconds.
            restart_s: delay before the process is started again after a failure, in seconds.
            images_of: returns the PNG files to log for a step, keyed by name. It is called when the step is logged.
        """
        self._settings, self._log, self._timeout_s, self._restart_s = settings, log, timeout_s, restart_s
        self._images_of = images_of
        self._queue: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._process: ChildProcess | None = None
        self._starts_at = 0.0
        """Earliest time at which the process may be started again."""
        self._num_rows = self._num_written = 0
        self._has_warned = False
        self._is_over = False
        """Whether to drop the remaining rows in the queue."""
        self._thread = threading.Thread(target=self._serve, name=f"tracker {settings.tracker}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step without NaN and infinite values, which some trackers do not support."""
        self._num_rows += 1
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if self._queue.qsize() < QUEUED_ROWS:
            self._queue.put((step, finite))
        else:
            self._warn(f"it is {QUEUED_ROWS} steps behind")

    def begin_close(self) -> None:
        """Request that the tracker close after writing all queued rows. Return without waiting."""
        self._queue.put(None)

    def end(self, deadline: float) -> None:
        """Wait until the tracker is closed. Kill its process at the deadline, and print the number of lost rows."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_over = True
            self._warn("closing timed out")
        self._end_process()
        if num_lost := self._num_rows - self._num_written:
            print(
                f"tracker {self._settings.tracker}: lost {num_lost} of {self._num_rows} steps (metrics.jsonl has them)",
                flush=True,
            )

    def _serve(self) -> None:
        self._attempt({"open": asdict(self._settings)})
        while not self._is_over and (row := self._queue.get()) is not None:
            self._num_written += self._attempt({"write": row})
            self._write_images(row[0])
        if self._process is not None:
            self._attempt({"close": True})

    def _write_images(self, step: int) -> None:
        """Log a step's images in a separate request, so that a failure does not affect the metrics."""
        try:
            images = {name: str(path) for name, path in self._images_of(step).items()}
        except OSError as error:  # the run folder may be temporarily unreadable
            return self._warn(f"images of step {step}: {error.strerror}")
        if images:
            self._attempt({"write_images": (step, images)})

    def _attempt(self, request: Mapping[str, Any]) -> bool:
        """Start the process if necessary, and send it a request. Return whether the request succeeded."""
        try:
            process = self._process
            if process is None:
                if time.monotonic() < self._starts_at:
                    return False
                process = self._start_process()
                if "open" not in request:
                    request = {"open": asdict(self._settings), **request}
            reason = process.call(json.dumps(request).encode() + b"\n", self._timeout_s)["failure"]
        except ChildFailure as failure:
            no_reply = f"no response within trackers.timeout_s={self._timeout_s:g}"
            reason = no_reply if failure.timed_out else f"its process exited ({failure})"
            self._end_process()
        if reason:
            self._warn(redacted(reason))
        return not reason

    def _start_process(self) -> ChildProcess:
        with self._log.open("ab") as log:
            self._process = ChildProcess(
                [*PYTHON, "-m", "megarl.run.trackers.process"],
                {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                log,
                is_self_cleaning=True,  # so that it writes its last rows even if this process is killed
            )
        return self._process

    def _end_process(self) -> None:
        self._starts_at = time.monotonic() + self._restart_s
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(
                f"megarl: warning: tracker {self._settings.tracker}: {reason}. The run continues, but the tracker may "
                f"lack steps (see {self._log})",
                file=sys.stderr,
                flush=True,
            )


def check_trackers(config: Config) -> None:
    """Raise UserError with one line for each configured tracker that is not installed."""
    missing = [name for name in config.run.trackers if find_spec(name) is None]
    if missing:
        listed = ", ".join(config.run.trackers)
        raise UserError(
            "\n".join(
                f"run.trackers=[{listed}]: {name} is not installed. Fix: run pip install {PACKAGES[name]}, or "
                f"remove {name} from run.trackers"
                for name in missing
            )
        )


@contextmanager
def open_trackers(config: Config, folder: RunFolder, step: int) -> Iterator[list[Tracker]]:
    """Yield the trackers for a run that resumes after `step`. On exit, close them within trackers.timeout_s."""
    timeout_s = config.trackers.timeout_s
    trackers = [
        Tracker(
            _settings(config, folder, name, step),
            folder.logs / f"tracker_{name}.log",
            timeout_s,
            images_of=folder.image_grids,
        )
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
    subfolder = folder.path / "trackers" / name
    subfolder.mkdir(parents=True, exist_ok=True)
    return Settings(name, config.run.name, str(subfolder), step, config.model_dump(mode="json"))
