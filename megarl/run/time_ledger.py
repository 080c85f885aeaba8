"""A run's time ledger: every second of every allocated device, by cause, over all attempts and jobs.

Each attempt's driver records contiguous rows (see TimeRecorder). The ledger places them in the allocations that Slurm
jobs record (see Attempts). Outside Slurm, each attempt is its own allocation, which begins with the driver's process.
The time that no row covers is attributed to the last event before it, or is `unexplained`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import is_plain, read_object
from megarl.core.text import counted
from megarl.run.attempts import Attempt, Attempts
from megarl.run.folder import LAUNCH
from megarl.run.time_causes import CAUSES, KEPT, LOST_WITH_STEP, Seconds, of_cause
from megarl.run.time_records import ENDED, AttemptTimes, Row, read_times

PREDICTION = f"{LAUNCH}/prediction.json"
"""File in a run's folder with the planner's prediction for the job."""

ROUNDING, ROUNDING_S = 0.001, 1e-4
"""Largest part of a row that is attributed to rounding, as a fraction plus device-seconds. It is distributed over the
row's causes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of the run's allocation with its device-seconds by cause."""

    begin: float
    end: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CauseRow:
    """A row in the table of causes.

    Attributes:
        meaning: description of the cause, with the shares of its parts.
        share: fraction of all device-seconds.
        step_s: seconds per kept step, averaged over the devices of the newest allocation; None without a kept step.
        planned_s: the planner's prediction of `step_s`; None without one.
    """

    cause: str
    meaning: str
    device_hours: float
    share: float
    step_s: float | None
    planned_s: float | None


@dataclass(frozen=True, slots=True)
class TimeLedger:
    """The device-seconds of a run by cause, over all of its allocations.

    Attributes:
        intervals: in chronological order. Time between allocations is included only if the job waited in Slurm's queue.
        num_steps: number of kept steps.
        num_devices: number of devices of the newest allocation.
        is_restart: whether the newest attempt follows one that failed or was killed.
        predicted: the planner's prediction of a step's seconds by cause, averaged over the devices.
    """

    intervals: Sequence[Interval] = ()
    num_steps: int = 0
    num_attempts: int = 0
    num_allocations: int = 0
    num_devices: float = 0.0
    is_restart: bool = False
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> Seconds:
        return add(interval.seconds for interval in self.intervals)

    def rows(self) -> list[CauseRow]:
        """Return the causes with their shares, except causes below 0.05 % that are not predicted."""
        seconds = self.seconds
        total, per_step = sum(seconds.values()), self.num_devices * self.num_steps
        found = [
            CauseRow(
                cause,
                CAUSES[cause] + _parts(cause, seconds),
                value / 3600,
                value / total,
                value / per_step if per_step else None,
                planned,
            )
            for cause in CAUSES
            for value, planned in [(of_cause(seconds, cause), self.predicted.get(cause))]
            if total and (value >= 0.0005 * total or planned)
        ]
        return found

    def describe(self) -> str:
        """Return the goodput and a table of causes, or a line that reports the lack of records."""
        seconds = self.seconds
        total = sum(seconds.values())
        if total <= 0:
            return "goodput: unknown, because the run has no time records"
        attempts, allocations = counted(self.num_attempts, "attempt"), counted(self.num_allocations, "allocation")
        first = f"goodput: steps whose results were kept took {100 * goodput(seconds):.1f} % of the allocated time"
        lines = [f"{first} ({total / 3600:,.2f} device-hours including queue time, {attempts}, {allocations})"]
        if self.predicted:
            lines.append(f"{'':>30}{'s/step':>9}{'planned':>9}")
        for row in self.rows():
            columns = f"     {_cell(row.step_s)}{_cell(row.planned_s)}" if self.predicted else ""
            lines.append(f"  {row.cause:<14}{100 * row.share:6.1f} %{columns}  {row.meaning}")
        return "\n".join(lines)


def _parts(cause: str, seconds: Mapping[str, float]) -> str:
    """Return the shares of a cause's parts as text, largest first; empty for a cause without parts."""
    parts = {name.partition("/")[2]: value for name, value in seconds.items() if name.startswith(f"{cause}/")}
    total = sum(seconds.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return "".join(f"{', ' if i else ': '}{name} {100 * s / total:.1f} %" for i, (name, s) in enumerate(largest))


def _cell(seconds: float | None) -> str:
    return f"{'-' if seconds is None else format(seconds, '.2f'):>9}"


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the fraction of the allocated time that was spent on steps whose results were kept."""
    allocated = sum(seconds.values()) - of_cause(seconds, "queue")
    kept = sum(of_cause(seconds, cause) for cause in KEPT)
    return min(1.0, kept / allocated) if allocated > 0 else 0.0  # rounded sums may exceed the total


def add(parts: Iterable[Mapping[str, float]]) -> Seconds:
    total: defaultdict[str, float] = defaultdict(float)
    for seconds in parts:
        for cause, value in seconds.items():
            total[cause] += value
    return dict(total)


def read_ledger(run: Path, now: float | None = None) -> TimeLedger:
    """Read the ledger of the run in the folder `run`. Damaged and deleted records are not errors: their time is
    `unexplained`. The newest allocation ends at `now`; None: at its last complete record."""
    return replace(make_ledger(read_times(run), Attempts(run).readable(), now), predicted=_predicted(run))


def _predicted(run: Path) -> Seconds:
    """Return the prediction in a run's folder. Omit invalid values."""
    values: dict[str, Any] = {}
    with suppress(UserError, OSError):
        values = read_object(run / PREDICTION)
    return {cause: seconds for cause, seconds in values.items() if cause in CAUSES and is_plain(seconds, float)}


@dataclass(slots=True)
class _Allocation:
    """A Slurm allocation or, outside Slurm, the lifetime of one attempt.

    Attributes:
        submitted: start of the wait in Slurm's queue.
        nodes: number of nodes; 0 if it is not recorded.
        launched: the records of the job's attempts, each with its last heartbeat.
        follows_failure: whether the last attempt before this allocation failed.
    """

    begin: float
    end: float
    submitted: float = 0.0
    nodes: int = 0
    launched: list[tuple[Attempt, float]] = field(default_factory=list)
    attempts: list[AttemptTimes] = field(default_factory=list)
    follows_failure: bool = False

    @property
    def used(self) -> int:
        """Number of devices on the nodes of the allocation's largest attempt."""
        return max((times.start.devices for times in self.attempts), default=0)


def make_ledger(
    attempts: Sequence[AttemptTimes], launched: Sequence[tuple[Attempt, float]], now: float | None = None
) -> TimeLedger:
    """Return the ledger for the records of a run.

    Args:
        attempts: the records of the drivers, in order.
        launched: the records of Slurm jobs' attempts, in order, each with its last heartbeat.
        now: see `read_ledger`.
    """
    attempts = sorted(attempts, key=lambda times: times.start.begin)
    num_steps, attempts = _without_lost_steps(attempts)
    allocations = _allocations(attempts, launched, now)
    per_node = max((times.start.devices / times.start.nodes for times in attempts), default=1.0)
    intervals: list[Interval] = []
    end = devices = 0.0
    for allocation in allocations:
        devices = max(allocation.nodes * per_node, allocation.used, 1)
        submitted = max(allocation.submitted, end)
        if allocation.submitted and submitted < allocation.begin:
            seconds = {"queue": (allocation.begin - submitted) * devices}
            intervals.append(Interval(submitted, allocation.begin, seconds))
        intervals += _fill(allocation, devices)
        end = max(end, allocation.begin, allocation.end)
    return TimeLedger(
        intervals,
        num_steps,
        num_attempts=max(len(attempts), len(launched)),
        num_allocations=len(allocations),
        num_devices=devices,
        is_restart=len(attempts) > 1 and attempts[-2].outcome != ENDED,
    )


def _without_lost_steps(attempts: Sequence[AttemptTimes]) -> tuple[int, list[AttemptTimes]]:
    """Return the number of kept steps, and the records with the time of all other steps as `repeated`. A step is lost
    if a later attempt resumes before it, or it is recorded again. The start-up after a failure is a restart."""
    first_again, num_kept, changed = float("inf"), 0, []
    for number in reversed(range(len(attempts))):
        times, rows = attempts[number], []
        is_restart = number > 0 and attempts[number - 1].outcome != ENDED
        for row in reversed(times.rows):
            is_lost = row.step is not None and row.step >= first_again
            if row.step is not None and not is_lost:
                first_again, num_kept = row.step, num_kept + 1
            seconds: defaultdict[str, float] = defaultdict(float)
            for cause, value in row.seconds.items():
                if is_lost and cause in LOST_WITH_STEP:
                    cause = "repeated"
                elif is_restart and cause.startswith("startup/"):
                    cause = cause.replace("startup", "restart", 1)
                seconds[cause] += value
            rows.append(replace(row, seconds=seconds))
        first_again = min(first_again, times.start.after_step + 1)
        changed.append(replace(times, rows=rows[::-1]))
    return num_kept, changed[::-1]


def _allocations(
    attempts: Sequence[AttemptTimes], launched: Sequence[tuple[Attempt, float]], now: float | None
) -> list[_Allocation]:
    """Return the allocations in chronological order, with their records. An allocation ends with its last record, or
    when Slurm requeued its job."""
    found: dict[tuple[str, int], _Allocation] = {}
    for attempt, seen in launched:
        key, last = (attempt.job, attempt.restart), max(attempt.began, attempt.ended or seen)
        allocation = found.setdefault(key, _Allocation(attempt.allocated, last))
        allocation.begin, allocation.end = min(allocation.begin, attempt.allocated), max(allocation.end, last)
        allocation.submitted = attempt.submitted
        allocation.nodes = max(allocation.nodes, attempt.nodes)
        allocation.launched.append((attempt, seen))
    for number, times in enumerate(attempts):
        start, end = times.start, times.end
        within = (key for key, slurm in found.items() if slurm.begin <= start.begin <= slurm.end and slurm.launched)
        key = (start.job, start.restart) if start.job else next(within, ("", number))
        allocation = found.setdefault(key, _Allocation(start.allocated or start.begin, end))
        allocation.begin, allocation.end = min(allocation.begin, start.begin), max(allocation.end, end)
        if number == len(attempts) - 1 and now is None and times.rows and not times.outcome:
            allocation.end = times.rows[-1].end  # the attempt may be in the middle of a later step
        allocation.nodes = max(allocation.nodes, start.nodes)
        if not allocation.attempts:
            allocation.follows_failure = number > 0 and attempts[number - 1].outcome != ENDED
        allocation.attempts.append(times)
    for (job, restart), allocation in found.items():
        following = found.get((job, restart + 1)) if job else None
        if following is not None and following.submitted:
            allocation.end = max(allocation.end, following.submitted)
    ordered = sorted(found.values(), key=lambda allocation: allocation.begin)
    for allocation, following in pairwise(ordered):
        allocation.end = min(allocation.end, following.begin)
    if ordered and now is not None:
        ordered[-1].end = max(ordered[-1].begin, now)
    return ordered


def _fill(allocation: _Allocation, devices: float) -> Iterator[Interval]:
    """Yield contiguous intervals from the start of the allocation to its end. Their device-seconds sum to its duration
    times `devices`."""
    events = _events(allocation)
    used = allocation.used or devices
    rows = [(row, times.start.devices) for times in allocation.attempts for row in times.rows]
    at = allocation.begin
    for row, of_attempt in sorted(rows, key=lambda item: item[0].begin):
        begin, end = max(row.begin, at), min(row.end, allocation.end)
        if begin < end:
            yield from _gap(at, begin, events, used, devices)
            yield Interval(begin, end, _scaled(row, end - begin, of_attempt, devices))
            at = end
    yield from _gap(at, allocation.end, events, used, devices)


def _scaled(row: Row, length: float, of_attempt: int, devices: float) -> Seconds:
    """Return the device-seconds of a part of a row. They add up to `length` times `devices`."""
    total = sum(row.seconds.values())
    most = (row.end - row.begin) * of_attempt
    is_complete = total > 0 and most - total < ROUNDING * most + ROUNDING_S
    factor = length / (row.end - row.begin) * (most / total if is_complete else 1.0)
    seconds = defaultdict(float, {cause: value * factor for cause, value in row.seconds.items()})
    seconds["unexplained"] += 0.0 if is_complete else length * of_attempt - sum(seconds.values())
    seconds["spare"] += length * (devices - of_attempt)
    return {cause: value for cause, value in seconds.items() if value > 0}


def _gap(
    begin: float, end: float, events: Sequence[tuple[float, str]], used: float, devices: float
) -> Iterator[Interval]:
    """Yield the intervals between two rows, each with the cause of the last event before it."""
    if begin >= end:
        return
    cuts = sorted({begin, end, *(time for time, _ in events if begin < time < end)})
    for left, right in pairwise(cuts):
        cause = next((cause for time, cause in reversed(events) if time <= left), "unexplained")
        spare = {"spare": (right - left) * (devices - used)} if devices > used else {}
        yield Interval(left, right, {cause: (right - left) * used, **spare})


def _events(allocation: _Allocation) -> list[tuple[float, str]]:
    """Return events outside the rows, in chronological order, each with the cause of the time after it."""
    begins = "restart/job" if allocation.follows_failure else "startup/job"
    events = [(allocation.begin, begins if allocation.launched else "unexplained")]
    for number, (attempt, seen) in enumerate(allocation.launched):
        last = attempt.ended or seen
        outcomes = [t.outcome for t in allocation.attempts if attempt.began - 1 <= t.start.begin <= last]
        if number:
            events.append((attempt.noticed or attempt.began, "restart/relaunch"))
        events.append((attempt.began, "unexplained"))
        events.append((last, "finish" if outcomes[-1:] == [ENDED] else "detection"))
    for times in allocation.attempts:
        after = "finish" if times.outcome == ENDED else "detection" if times.outcome else "repeated"
        events.append((times.rows[-1].end if times.rows else times.start.begin, after))
    return sorted(events, key=lambda event: event[0])
