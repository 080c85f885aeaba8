"""The time records that an attempt's driver writes: the attempt's start, and contiguous rows with device-seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.trace import FILE as TRACE
from megarl.cluster.trace import MAX_LINE, parse_spans
from megarl.core.errors import UserError
from megarl.core.files import is_plain, numbered, open_regular
from megarl.core.jsonl import read_objects
from megarl.run.folder import ATTEMPT
from megarl.run.time_causes import CAUSES

FILE = "time.jsonl"

_PART = re.compile("[a-z ]{0,20}")
"""Matches the part in a cause such as startup/engines. Its characters are limited, because it is printed."""

FAILED, ENDED = "failed", "ended"
"""Outcomes of an attempt. An attempt without an outcome was killed."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first row of an attempt. Times are Unix timestamps.

    Attributes:
        begin: start of the driver's process.
        after_step: the step after which the attempt resumes.
        devices: number of devices on the attempt's nodes.
        nodes: number of these nodes.
        job, restart, allocated: the Slurm allocation, as in Attempt; an empty `job` outside Slurm.
    """

    begin: float
    after_step: int
    devices: int
    nodes: int = 1
    job: str = ""
    restart: int = 0
    allocated: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """An interval of an attempt with its device-seconds by cause. It begins where the previous row ended.

    Attributes:
        step: the step whose metrics were complete at the end of the interval; None for other intervals.
        outcome: FAILED or ENDED in the last row of an attempt, else "".
    """

    begin: float
    end: float
    seconds: Mapping[str, float]
    step: int | None = None
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """The records of one attempt. last_seen: end of the last span in its trace."""

    start: Start
    rows: Sequence[Row] = ()
    last_seen: float = 0.0

    @property
    def outcome(self) -> str:
        return self.rows[-1].outcome if self.rows else ""

    @property
    def end(self) -> float:
        return max(self.start.begin, self.rows[-1].end if self.rows else 0.0, 0.0 if self.outcome else self.last_seen)


def read_times(run: Path) -> list[AttemptTimes]:
    """Return the records of a run's attempts in order. Attempts without records are omitted."""
    return [times for logs in numbered(run / "logs", ATTEMPT).values() if (times := _read(logs)) is not None]


def _read(logs: Path) -> AttemptTimes | None:
    """Return the records of an attempt, or None if there are none. Damaged rows are omitted. If the first row is
    damaged, its values are inferred from the other rows."""
    rows: list[dict[str, Any]] = []
    with suppress(UserError, OSError):
        rows = read_objects(logs / FILE)[0]
    found = [row for values in rows if (row := parse_row(values)) is not None]
    start = parse_start(rows[0]) if rows else None
    if start is None and found:
        first = found[0]
        devices = round(sum(first.seconds.values()) / (first.end - first.begin))
        first_step = next((row.step for row in found if row.step is not None), 2**53)
        start = Start(first.begin, first_step - 1, max(1, devices))
    return None if start is None else AttemptTimes(start, found, _last_seen(logs))


def parse_start(values: Mapping[str, Any]) -> Start | None:
    """Return the first row of an attempt with these values, or None if they are invalid."""
    kinds = {"begin": float, "after_step": int, "devices": int, "nodes": int, "job": str, "restart": int}
    kinds["allocated"] = float
    if values.keys() != kinds.keys() or not all(is_plain(values[name], kind) for name, kind in kinds.items()):
        return None
    start = Start(**values)
    return start if 0 < start.devices <= 2**24 and 0 < start.nodes <= start.devices else None


def parse_row(values: Mapping[str, Any]) -> Row | None:
    """Return the row with these values, or None if they are invalid."""
    begin, end, seconds = values.get("begin"), values.get("end"), values.get("seconds")
    step, outcome = values.get("step"), values.get("outcome", "")
    if not (is_plain(begin, float) and is_plain(end, float) and begin < end and isinstance(seconds, dict)):
        return None
    if not (step is None or is_plain(step, int)) or outcome not in ("", FAILED, ENDED):
        return None
    valid = all(_is_cause(name) and is_plain(value, float) and value >= 0 for name, value in seconds.items())
    return Row(begin, end, seconds, step, outcome) if valid else None


def _is_cause(name: str) -> bool:
    cause, _, part = name.partition("/")
    return cause in CAUSES and cause != "queue" and _PART.fullmatch(part) is not None


def _last_seen(logs: Path) -> float:
    """Return the end of the last span in the trace, or 0 without a trace."""
    with suppress(UserError, OSError), open_regular(logs / TRACE) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE))
        return max((span.end for span in parse_spans(file.readlines(MAX_LINE))), default=0.0)
    return 0.0
