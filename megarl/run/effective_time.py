"""Computes goodput: the fraction of a job's allocated time that was spent on steps whose results were kept."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.files import is_plain
from megarl.core.jsonl import read_objects
from megarl.run.attempts import Attempts

ALLOCATED = "MEGARL_ALLOCATED"
"""Name of the environment variable with the start of the Slurm allocation as a Unix timestamp."""


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """A run's effective time (the duration of the steps in its metrics) and its allocated time (the duration of all its
    allocations, including startup and lost steps), in seconds."""

    effective: float
    allocated: float

    @property
    def share(self) -> float:
        return self.effective / self.allocated

    def __str__(self) -> str:
        return f"completed steps took {100 * self.share:.1f} % of the allocated time ({self.allocated:.0f} s)"


def effective_time(run: Path) -> EffectiveTime:
    """Return the effective time so far of the run in folder `run`."""
    return EffectiveTime(_completed_s(run), allocated_s(run, time.time()))


class EffectiveShare:
    """Computes the goodput metric of a run inside a Slurm job."""

    def __init__(self, run: Path):
        self._run = run
        self._effective_s = _completed_s(run)

    def metrics(self, step_metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the run's goodput at the end of a step; empty outside a Slurm job, or if the user has deleted or
        damaged the records of attempts. `step_metrics` must contain the metric `time/step`."""
        if ALLOCATED not in os.environ:
            return {}
        self._effective_s += step_metrics["time/step"]
        with suppress(UserError, OSError):
            if (allocated := allocated_s(self._run, time.time())) > 0:
                return {"cluster/goodput": EffectiveTime(self._effective_s, allocated).share}
        return {}


def _completed_s(run: Path) -> float:
    """Return the total duration of the steps in a run's metrics, in seconds."""
    metrics = run / "metrics.jsonl"
    rows = read_objects(metrics)[0] if os.path.lexists(metrics) else []
    # The evaluation before the first step has no step time.
    return sum(value for row in rows if is_plain(value := row.get("time/step"), float))


def allocated_s(run: Path, now: float) -> float:
    """Return the total time of all allocations. Each lasts until its last heartbeat, the newest one until `now`."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for attempt, seen in Attempts(run).all():
        allocation = attempt.job, attempt.restart
        begin, end = spans.get(allocation, (attempt.allocated, attempt.began))
        spans[allocation] = (begin, max(end, seen))
    if spans:  # the user may have deleted the files
        newest = list(spans)[-1]
        spans[newest] = (spans[newest][0], now)
    return sum(end - begin for begin, end in spans.values())
