"""The trace of a run: which process worked on what, and when."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.cluster.groups.group import TimedResult
    from megarl.cluster.pending import Answers

FILE = "trace.jsonl"

DRIVER = "driver"
"""The name of the run's own process, whose tasks are steps and their phases."""


@dataclass(frozen=True, slots=True)
class Span:
    """A task of a process, from begin to end in seconds since the epoch, by the clock of its machine."""

    process: str
    task: str
    begin: float
    end: float


class Trace:
    """The trace of an attempt: a line of JSON in its logs for each task that a process has done."""

    def __init__(self, logs: Path):
        self._path = logs / FILE
        self._seconds: Counter[str] = Counter()

    def record(self, task: str, begin: float, end: float) -> None:
        """Writes a span of the driver."""
        self._write([Span(DRIVER, task, begin, end)])

    def add(self, task: str, answers: Answers) -> dict[str, Any]:
        """Writes the times of the answers. Returns their values, by process."""
        timed: dict[str, TimedResult] = answers.values
        spans = [Span(process, task, answer.begin, answer.end) for process, answer in timed.items()]
        self._write(spans)
        for span in spans:
            self._seconds[span.process] += span.end - span.begin
        return {process: answer.value for process, answer in timed.items()}

    def take_seconds(self, process: str) -> float:
        """Returns the seconds of all tasks of a process that were added since this was last asked."""
        return self._seconds.pop(process, 0.0)

    def _write(self, spans: Sequence[Span]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(span)) + "\n" for span in spans)


def read_trace(logs: Path) -> list[Span]:
    """Returns all spans that were written to these logs, in the order in which the driver has learnt of them."""
    return [Span(**json.loads(line)) for line in (logs / FILE).read_text(encoding="utf-8").splitlines()]
