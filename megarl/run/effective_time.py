"""The share of a job's allocations that went into steps that lasted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.run.attempts import Attempts

ALLOCATED = "MEGARL_ALLOCATED"
"""The variable of a job's tasks with the begin of the allocation, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """lasted: the seconds of the steps that are in the run's metrics; allocated: those of all allocations so far, the
    starts of attempts and steps that were lost included."""

    lasted: float
    allocated: float

    @property
    def share(self) -> float:
        return self.lasted / self.allocated

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % of {self.allocated:.0f} s of allocation went into steps that lasted"


def effective_time(run: Path) -> EffectiveTime:
    """Return it for a run in a job, by its folder, until now."""
    return EffectiveTime(_lasted_s(run), allocated_s(run, time.time()))


class EffectiveShare:
    """The share as a metric of each step of a run that is in a job; of another, none."""

    def __init__(self, run: Path):
        """run: its folder, when it goes on."""
        self._run = run
        self._lasted = _lasted_s(run)

    def metrics(self, of_step: Mapping[str, float]) -> dict[str, float]:
        """Return the metric at the end of a step. of_step: its other metrics."""
        if ALLOCATED not in os.environ:
            return {}
        self._lasted += of_step["time/step"]
        return {"cluster/goodput": EffectiveTime(self._lasted, allocated_s(self._run, time.time())).share}


def _lasted_s(run: Path) -> float:
    """Return the seconds of the steps in a run's metrics."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    whole = [line for line in lines if line.endswith("\n")]  # the last one is torn where the driver was killed
    # The line of an evaluation before the first step has no such time.
    return sum(json.loads(line).get("time/step", 0.0) for line in whole)


def allocated_s(run: Path, now: float) -> float:
    """Return the seconds of all allocations of a run's jobs: each ends when its last attempt was last seen to be under
    way, the newest one now."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for attempt, seen in Attempts(run).all():
        allocation = attempt.job, attempt.restart
        begin, end = spans.get(allocation, (attempt.allocated, attempt.began))
        spans[allocation] = (begin, max(end, seen))
    newest = list(spans)[-1]
    spans[newest] = (spans[newest][0], now)
    return sum(end - begin for begin, end in spans.values())
