"""Wall-clock timers for the phases of a step and for single operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Stopwatch:
    """Times the phases of one step, starting at construction. Durations of repeated phases are summed."""

    def __init__(self, record: Callable[[str, float, float], object] | None = None) -> None:
        """record: called after each phase with its name, begin and end, in seconds since the epoch."""
        self._record = record
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin, start = time.time(), time.perf_counter()
        yield
        if self._record is not None:
            self._record(name, begin, time.time())
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return time/PHASE for each phase and time/step, in seconds."""
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {**times, "time/step": time.perf_counter() - self._start}


class ElapsedTime:
    """Times one operation, starting at construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def print(self, event: str) -> None:
        """Print an event and the elapsed time."""
        print(f"{event} in {time.perf_counter() - self._start:.1f} s", flush=True)


def process_begin(pid: int) -> float:
    """Return the start time of a process in seconds since the epoch, accurate to about 10 ms."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
