"""The run's trace: each process's tasks, with their start and end times. Its size on disk is bounded."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megarl.core.errors import UserError
from megarl.core.files import lines_of, open_regular, replacement
from megarl.core.optional_logs import OptionalLog

if TYPE_CHECKING:
    from megarl.cluster.groups.group import TimedResult
    from megarl.cluster.pending import Answers

FILE = "trace.jsonl"

EARLIER = "trace.earlier.jsonl.gz"
"""The window before the one in FILE, compressed. Older windows are discarded."""

WINDOW_BYTES = 32 * 2**20
"""Size of a window. It holds 2,000 steps or more, because a step writes at most MAX_PROCESSES spans of 90 bytes per
task."""

MAX_LINE = 2**16
"""Maximum number of bytes read per line. A file written by another program may have lines of any length."""

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


SPANS = OptionalLog("spans of the trace")


class Trace:
    """An attempt's trace in its log folder: one JSON line for each process that has finished a task, for at most
    MAX_PROCESSES processes per task. Only the last one or two windows of WINDOW_BYTES are kept."""

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
        SPANS.attempt(self._path, partial(self._append, spans), len(spans))

    def _append(self, spans: Sequence[Span]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(span)) + "\n" for span in spans)
            is_full = file.tell() >= WINDOW_BYTES
        if is_full:
            self._begin_window()

    def _begin_window(self) -> None:
        with (
            self._path.open("rb") as window,
            replacement(self._path.with_name(EARLIER)) as compressed,
            gzip.open(compressed, "wb", compresslevel=1) as file,
        ):
            shutil.copyfileobj(window, file)
        self._path.unlink()


def evenly_spaced(spans: Sequence[Span], limit: int) -> Sequence[Span]:
    """Return at most `limit` evenly spaced spans, including the first and the last."""
    if len(spans) <= limit:
        return spans
    return [spans[i * (len(spans) - 1) // (limit - 1)] for i in range(limit)]


def read_spans(logs: Path) -> Iterator[Span]:
    """Yield an attempt's spans one at a time, oldest first. Lines that are not spans, such as the last line of a killed
    attempt, are skipped. Raise a UserError for a damaged compressed file."""
    if (earlier := logs / EARLIER).exists():
        with open_regular(earlier) as file, gzip.open(file) as window:
            all_lines = iter(partial(window.readline, MAX_LINE), b"")
            lines = takewhile(lambda _: window.tell() <= 2 * WINDOW_BYTES, all_lines)
            try:
                yield from parse_spans(lines)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{earlier}: not a complete gzip file ({error}). Fix: remove the file") from None
    if (latest := logs / FILE).exists():
        with open_regular(latest) as file:
            yield from parse_spans(lines_of(file, MAX_LINE))


class SpanReader:
    """Reads an attempt's trace while the same process writes it. Each `read` returns the spans written since the
    previous one, including across windows."""

    def __init__(self, logs: Path):
        self._path = logs / FILE
        self._file: BinaryIO | None = None

    def read(self) -> list[Span]:
        """Return the new spans. The user may have deleted the file or replaced it."""
        spans = [] if self._file is None else self._rest(self._file)
        with suppress(OSError, UserError):
            file = open_regular(self._path)
            if self._file is not None and os.path.samestat(os.fstat(file.fileno()), os.fstat(self._file.fileno())):
                file.close()
                return spans
            if self._file is not None:
                self._file.close()
            self._file = file
            spans += self._rest(file)
        return spans

    def _rest(self, file: BinaryIO) -> list[Span]:
        return list(parse_spans(iter(partial(file.readline, MAX_LINE), b"")))


def parse_spans(lines: Iterable[bytes]) -> Iterator[Span]:
    """Yield the spans in the lines of a trace, and skip all other lines."""
    for line in lines:
        try:
            row = json.loads(line.decode("utf-8", "replace"))
            span = Span(sys.intern(row["process"]), sys.intern(row["task"]), float(row["begin"]), float(row["end"]))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        if math.isfinite(span.begin) and math.isfinite(span.end):
            yield span
