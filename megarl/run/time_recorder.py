"""Records the time of an attempt while it runs, and computes the goodput metrics."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict

from megarl.cluster.placement import Placement
from megarl.cluster.supervision.scratch import VARIABLE
from megarl.cluster.trace import SpanReader
from megarl.core.optional_logs import OptionalLog
from megarl.core.timing import process_begin
from megarl.run.attempts import ALLOCATED
from megarl.run.folder import RunFolder
from megarl.run.time_causes import (
    CAUSES,
    LOST_WITH_STEP,
    WORKERS,
    Devices,
    Seconds,
    of_cause,
    start_seconds,
    step_seconds,
)
from megarl.run.time_ledger import goodput, read_ledger
from megarl.run.time_records import FILE, Row, Start

IMPORTED = time.time()
"""Approximate end of the driver's imports: this module is among the last to be imported."""

REMEMBERED = 1000
"""Number of recent steps whose time becomes `repeated` if the same attempt repeats them."""

ROWS = OptionalLog("records of time")


class TimeRecorder:
    """Writes contiguous rows of device-seconds by cause, from the start of the driver's process to its end. A failed
    write never stops the run."""

    def __init__(self, folder: RunFolder, placement: Placement, after_step: int, samples_while_training: bool = False):
        """after_step: the step after which the attempt resumes. samples_while_training: see Devices."""
        self._run, self._path, self._spans = folder.path, folder.logs / FILE, SpanReader(folder.logs)
        self._devices = Devices.of(placement, samples_while_training)
        self._step, self._is_started = after_step, False
        self._steps: deque[tuple[int, Seconds]] = deque(maxlen=REMEMBERED)
        # The attempt began with the parent process, the supervisor.
        self._at = process_begin(os.getppid()) if VARIABLE in os.environ else time.time()
        allocated = float(os.environ.get(ALLOCATED, 0.0))
        job = os.environ.get("SLURM_JOB_ID", "") if allocated else ""
        restart = int(os.environ.get("SLURM_RESTART_COUNT", 0)) if allocated else 0
        nodes = len(placement.nodes)
        start = Start(self._at, after_step, self._devices.total, nodes, job, restart, allocated)
        ROWS.append(self._path, [asdict(start)], 1)
        ledger = read_ledger(folder.path, now=self._at)
        self._seconds = defaultdict(float, ledger.seconds)
        self._is_restart = ledger.is_restart
        self._num_spare = max(0.0, ledger.num_devices - self._devices.total)
        self.end_start("imports", min(time.time(), max(self._at, IMPORTED)))
        self.end_start("checks")

    def end_start(self, part: str, now: float | None = None) -> None:
        """Record the part of the start-up from the end of the previous part to `now`."""
        now = time.time() if now is None else now
        self._record(now, start_seconds(self._at, now, self._spans.read(), self._devices, part))

    def begin_steps(self) -> None:
        """Record the last part of the start-up: the first refit and its checks."""
        self.end_start("refit")
        self._is_started = True

    def end_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a step with these metrics. Return the run's goodput and its causes so far, as metrics."""
        now, sampling_s = time.time(), None
        if "idle/engines" in metrics:
            sampling_s = (1 - metrics["idle/engines"]) * metrics["time/step"]
        self._repeat(step)
        seconds = step_seconds(self._at, now, self._spans.read(), self._devices, sampling_s)
        self._steps.append((step, seconds))
        self._step = step
        self._record(now, seconds, step)
        return self._metrics()

    def end(self, step: int, outcome: str) -> None:
        """Record the end of the attempt. step: the last step that has begun. If its metrics are not recorded, it will
        be repeated."""
        now = time.time()
        if self._is_started:
            cause, spans = "repeated" if step > self._step else "finish", self._spans.read()
            seconds = _replaced(step_seconds(self._at, now, spans, self._devices), cause)
        else:
            seconds = start_seconds(self._at, now, self._spans.read(), self._devices, WORKERS)
        self._record(now, seconds, outcome=outcome)

    def _repeat(self, step: int) -> None:
        """Count the time of this step and later ones as `repeated`, if they are recorded already."""
        while self._steps and self._steps[-1][0] >= step:
            _, seconds = self._steps.pop()
            for cause, value in seconds.items():
                if cause in LOST_WITH_STEP:
                    self._seconds[cause] -= value
                    self._seconds["repeated"] += value

    def _record(self, now: float, seconds: Seconds, step: int | None = None, outcome: str = "") -> None:
        """Write the row that ends at `now`. Write nothing if the clock was set back."""
        if now > self._at:
            rounded = {cause: round(value, 6) for cause, value in seconds.items()}
            row = asdict(Row(self._at, now, rounded, step, outcome))
            ROWS.append(self._path, [{key: value for key, value in row.items() if value not in (None, "")}], 1)
            for cause, value in seconds.items():
                self._seconds[cause.replace("startup/", "restart/") if self._is_restart else cause] += value
            self._seconds["spare"] += (now - self._at) * self._num_spare
            self._at = now

    def _metrics(self) -> dict[str, float]:
        total = sum(self._seconds.values())
        if total <= 0:
            return {}
        shares = {f"goodput/{cause}": of_cause(self._seconds, cause) / total for cause in CAUSES}
        return {"cluster/goodput": goodput(self._seconds), **{name: share for name, share in shares.items() if share}}


def _replaced(seconds: Mapping[str, float], cause: str) -> Seconds:
    """Return a step's device-seconds with all causes that depend on the step's outcome merged into `cause`."""
    replaced: defaultdict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        replaced[cause if name in (*LOST_WITH_STEP, "unexplained") else name] += value
    return dict(replaced)
