"""Reads the metrics of a run as arrays over its steps."""

from __future__ import annotations

import os
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
        steps: step numbers, int64 [S].
        columns: maps each metric to its values, float64 [S]. Steps without a finite value have NaN.
        nonfinite: maps each metric to the steps whose value is NaN or infinite.
        unreadable: numbers of the lines in metrics.jsonl that could not be parsed.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    nonfinite: Mapping[str, list[int]]
    unreadable: list[int]

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
    objects, unreadable = read_objects(path) if os.path.lexists(path) else ([], [])
    by_step = {record["step"]: record for record in objects if _is_step(record.get("step"))}
    steps = sorted(by_step)
    records = [by_step[step] for step in steps]
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "nonfinite"))
    nonfinite: dict[str, list[int]] = {}
    for step, record in zip(steps, records, strict=True):
        names_of_step = record.get("nonfinite")
        for name in names_of_step if isinstance(names_of_step, list) else ():
            nonfinite.setdefault(str(name), []).append(step)
    values = {name: [record.get(name) for record in records] for name in names}
    columns = {name: np.array([_number(value) for value in of_name]) for name, of_name in values.items()}
    return History(np.array(steps, dtype=np.int64), columns, nonfinite, unreadable)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 62


def _number(value: Any) -> float:
    """Return a value as a float; NaN if it is not a number, or is an integer larger than any float."""
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
