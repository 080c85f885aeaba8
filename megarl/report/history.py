"""The metrics of a run as arrays over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.jsonl import read_objects


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of S steps in ascending order.

    Attributes:
        steps: int64 [S].
        columns: metric -> float64 [S], NaN where a step has no finite value.
        nonfinite: metric -> steps with NaN or infinity.
        unreadable: line numbers of metrics.jsonl that could not be parsed.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    nonfinite: Mapping[str, list[int]]
    unreadable: list[int]

    def __getitem__(self, metric: str) -> np.ndarray:
        """Return a metric as float64 [S], all NaN if the run does not have it."""
        return self.columns.get(metric, np.full(len(self.steps), np.nan))

    def finite(self, metric: str) -> np.ndarray:
        """Return the metric's finite values in step order."""
        values = self[metric]
        return values[np.isfinite(values)]


def read_history(path: Path) -> History:
    """Read metrics.jsonl. A missing file means no steps. If a step is repeated, its last line counts."""
    objects, unreadable = read_objects(path) if path.exists() else ([], [])
    by_step = {record["step"]: record for record in objects if isinstance(record.get("step"), int)}
    steps = sorted(by_step)
    records = [by_step[step] for step in steps]
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "nonfinite"))
    nonfinite: dict[str, list[int]] = {}
    for step, record in zip(steps, records, strict=True):
        for name in record.get("nonfinite", ()):
            nonfinite.setdefault(name, []).append(step)
    columns = {name: np.array([_number(record.get(name)) for record in records]) for name in names}
    return History(np.array(steps, dtype=np.int64), columns, nonfinite, unreadable)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
