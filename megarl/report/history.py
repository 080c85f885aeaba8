"""Reads the metrics of a run as arrays over its steps."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megarl.core.files import MAX_LINE_BYTES, lines_of, open_regular
from megarl.core.jsonl import parse_lines


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of S steps in ascending order.

    Attributes:
        steps: step numbers, int64 [S].
        columns: maps each metric to its values, float64 [S]. Steps without a finite value have NaN.
        nonfinite: maps each metric to the steps whose value is NaN or infinite.
        unreadable: numbers of the lines in metrics.jsonl that could not be parsed.
        revision: a number that changes when existing steps change, but not when steps are appended.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    nonfinite: Mapping[str, list[int]]
    unreadable: list[int]
    revision: int = 0

    def __getitem__(self, metric: str) -> np.ndarray:
        """Return the values of a metric as float64 [S]. All values are NaN if the run does not have the metric."""
        return self.columns.get(metric, np.full(len(self.steps), np.nan))

    def finite(self, metric: str) -> np.ndarray:
        """Return the finite values of a metric in step order."""
        values = self[metric]
        return values[np.isfinite(values)]


def read_history(path: Path) -> History:
    """Read a metrics.jsonl file. If the file does not exist, the history has no steps. If a step occurs more than once,
    its last line is used."""
    return HistoryReader(path).read()


class HistoryReader:
    """Reads a growing metrics.jsonl file. Each `read` parses only the lines appended since the previous `read`."""

    def __init__(self, path: Path):
        self._path, self._revision = path, 0
        self._forget()

    def _forget(self) -> None:
        self._file, self._offset, self._num_lines = (0, 0), 0, 0
        self._unreadable: list[int] = []
        self._steps: list[int] = []
        self._values: dict[str, list[float]] = {}
        self._nonfinite: dict[int, list[str]] = {}
        self._revision += 1

    def read(self) -> History:
        """Return the current history. Raise a UserError if the file is not a regular file."""
        tail = self._append() if os.path.lexists(self._path) else []
        nonfinite: dict[str, list[int]] = {}
        for step in self._steps:
            for name in self._nonfinite.get(step, ()):
                nonfinite.setdefault(name, []).append(step)
        columns = {name: np.array(values) for name, values in self._values.items()}
        steps, unreadable = np.array(self._steps, dtype=np.int64), [*self._unreadable, *tail]
        return History(steps, columns, nonfinite, unreadable, self._revision)

    def _append(self) -> list[int]:
        """Add the new lines. Return [number of the last line] if it is incomplete and cannot be parsed, else []."""
        with open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._forget()
                self._file = status.st_dev, status.st_ino
            file.seek(self._offset)
            objects, unreadable = parse_lines(self._complete_lines(file), self._num_lines + 1)
            file.seek(self._offset)
            last_objects, tail = parse_lines(islice(lines_of(file), 1), self._num_lines + 1)
        self._unreadable += unreadable
        for record in [*objects, *last_objects]:
            if _is_step(record.get("step")):
                self._put(record)
        return tail

    def _complete_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the new lines and count them. An incomplete last line is left for the next `read`."""
        for line in lines_of(file):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return
            self._offset, self._num_lines = self._offset + len(line), self._num_lines + 1
            yield line

    def _put(self, record: Mapping[str, Any]) -> None:
        """Add a step, or replace its earlier line."""
        step, names = record["step"], record.get("nonfinite")
        index = bisect_left(self._steps, step)
        before = [values[index] for values in self._values.values()] if index < len(self._steps) else None
        if self._steps[index : index + 1] != [step]:
            self._steps.insert(index, step)
            for values in self._values.values():
                values.insert(index, np.nan)
        for name in record:
            if name not in ("step", "nonfinite") and name not in self._values:
                self._values[name] = [np.nan] * len(self._steps)
        for name, values in self._values.items():
            values[index] = _number(record.get(name))
        after = [values[index] for values in self._values.values()]
        if before is not None and not np.array_equal(before, after, equal_nan=True):
            self._revision += 1
        self._nonfinite[step] = [str(name) for name in names] if isinstance(names, list) else []


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 62


def _number(value: Any) -> float:
    """Return a value as a float; NaN if it is not a number, or is an integer larger than any float."""
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
