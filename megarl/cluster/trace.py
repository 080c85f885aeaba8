"""The run's trace: each process's tasks, with their start and end times. Its size on disk is bounded."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.core.files import append_lines, open_regular, retry_when_full

if TYPE_CHECKING:
    from megarl.cluster.groups.group import TimedResult
    from megarl.cluster.pending import Answers

FILE = "trace.jsonl"

EARLIER = "trace.earlier.jsonl.gz"
"""The window before the one in FILE, compressed. Older windows are discarded."""

WINDOW_BYTES = 32 * 2**20
"""Size of a window. It holds 2,000 steps or more, as a step writes at most MAX_PROCESSES spans of 90 bytes per task."""

MAX_PROCESSES = 32
"""Maximum number of processes per task whose spans are written. They are evenly spaced by rank."""

DRIVER = "driver"
"""Name of the driver process in the trace. Its tasks are steps and their phases."""


@dataclass(frozen=True, slots=True)
class Span:
    """One task in a process. `begin` and `end` are seconds since the epoch on the machine's clock."""

    process: str
    task: str
    begin: float
    end: float


class Trace:
    """An attempt's trace: one JSON line per finished task, in the attempt's log folder. It covers at most
    MAX_PROCESSES processes per task, and the last one or two windows of WINDOW_BYTES."""

    def __init__(self, logs: Path):
        self._path = logs / FILE
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def record(self, task: str, begin: float, end: float) -> None:
        """Write a span for a task in the driver."""
        self._write([Span(DRIVER, task, begin, end)])

    def add(self, task: str, answers: Answers) -> dict[str, Any]:
        """Write spans for the TimedResults in the answers. Return the results' values by process name."""
        timed: dict[str, TimedResult] = answers.values
        spans = [Span(process, task, answer.begin, answer.end) for process, answer in timed.items()]
        self._write(evenly_spaced(spans, MAX_PROCESSES))
        for span in spans:
            self._seconds[span.process] += span.end - span.begin
        return {process: answer.value for process, answer in timed.items()}

    def take_seconds(self, process: str) -> float:
        """Return the seconds that a process has spent in tasks since the last call."""
        return self._seconds.pop(process, 0.0)

    def _write(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        append_lines(self._path, ["\n".join(json.dumps(asdict(span)) for span in spans)])
        if self._path.stat().st_size >= WINDOW_BYTES:
            retry_when_full(self._begin_window, self._path)

    def _begin_window(self) -> None:
        compressed = self._path.with_name(f".{EARLIER}")
        with self._path.open("rb") as window, gzip.open(compressed, "wb", compresslevel=1) as file:
            shutil.copyfileobj(window, file)
        compressed.replace(self._path.with_name(EARLIER))
        self._path.unlink()


def evenly_spaced(spans: Sequence[Span], limit: int) -> Sequence[Span]:
    """Return at most `limit` evenly spaced spans, including the first and the last."""
    if len(spans) <= limit:
        return spans
    return [spans[i * (len(spans) - 1) // (limit - 1)] for i in range(limit)]


def read_spans(logs: Path) -> Iterator[Span]:
    """Yield an attempt's spans one at a time, oldest first. Lines that are not spans, such as the last line of a killed
    attempt, are skipped."""
    if (earlier := logs / EARLIER).exists():
        with open_regular(earlier) as file, gzip.open(file, "rt", encoding="utf-8", errors="replace") as lines:
            yield from _spans(lines)
    if (latest := logs / FILE).exists():
        with open_regular(latest) as file:
            yield from _spans(line.decode("utf-8", "replace") for line in file)


def _spans(lines: Iterable[str]) -> Iterator[Span]:
    for line in lines:
        try:
            row = json.loads(line)
            span = Span(sys.intern(row["process"]), sys.intern(row["task"]), float(row["begin"]), float(row["end"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        yield span
