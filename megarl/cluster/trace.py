"""The run's trace: each process's tasks, with their start and end times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.cluster.groups.group import TimedResult
    from megarl.cluster.pending import Answers

FILE = "trace.jsonl"

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
    """An attempt's trace: one JSON line per finished task, in the attempt's log folder."""

    def __init__(self, logs: Path):
        self._path = logs / FILE
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def record(self, task: str, begin: float, end: float) -> None:
        """Write a span for a task in the driver."""
        self._write([Span(DRIVER, task, begin, end)])

    def add(self, task: str, answers: Answers) -> dict[str, Any]:
        """Write a span for each TimedResult in the answers. Return the results' values by process name."""
        timed: dict[str, TimedResult] = answers.values
        spans = [Span(process, task, answer.begin, answer.end) for process, answer in timed.items()]
        self._write(spans)
        for span in spans:
            self._seconds[span.process] += span.end - span.begin
        return {process: answer.value for process, answer in timed.items()}

    def take_seconds(self, process: str) -> float:
        """Return the seconds that a process has spent in tasks since the last call."""
        return self._seconds.pop(process, 0.0)

    def _write(self, spans: Sequence[Span]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(span)) + "\n" for span in spans)
