"""Exports a run's trace as Chrome trace events for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.trace import DRIVER, FILE, Span
from megarl.core.errors import UserError
from megarl.core.files import numbered, replace_text
from megarl.core.jsonl import read_objects
from megarl.run.folder import ATTEMPT

STEP = re.compile(r"step \d+")
MICROSECONDS = 1e6


def write(run: Path, out: Path | None = None) -> Path:
    """Write a trace that covers all attempts of a run, and return its path. Raise a UserError if the run has no trace.
    out: file to write. Default: trace.json in the run folder."""
    attempts = {}
    for number, logs in numbered(run / "logs", ATTEMPT).items():
        # A partial last line, left by a killed attempt, is dropped.
        if (logs / FILE).exists() and (rows := read_objects(logs / FILE, keep=_span_fields)[0]):
            attempts[number] = [Span(**row) for row in rows]
    if not attempts:
        raise UserError(f"{run}: logs/{ATTEMPT.format(1)}/{FILE} contains no tasks. Fix: pass a run folder")
    out = run / "trace.json" if out is None else out
    replace_text(out, json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(attempts))}))
    return out


def _span_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row. Raise TypeError if it is not a span."""
    Span(**row)
    return row


def events(attempts: dict[int, list[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the events of each process, starting with the driver, and a mark at the start of each attempt. Concurrent
    tasks in the same process are shown in separate rows."""
    all_spans = [span for spans in attempts.values() for span in spans]
    origin = min(span.begin for span in all_spans)
    names = sorted({span.process for span in all_spans}, key=lambda name: (name != DRIVER, _natural(name)))
    for pid, name in enumerate(names, start=1):
        yield _metadata("process_name", pid, name=name)
        yield _metadata("process_sort_index", pid, sort_index=pid)
        for lane, spans in enumerate(lanes(span for span in all_spans if span.process == name)):
            if lane:
                yield _metadata("thread_name", pid, lane, name=f"concurrent ({lane})")
            for span in spans:
                yield {
                    "ph": "X",
                    "name": span.task,
                    "cat": "step" if STEP.fullmatch(span.task) else "task",
                    "pid": pid,
                    "tid": lane,
                    "ts": MICROSECONDS * (span.begin - origin),
                    "dur": MICROSECONDS * (span.end - span.begin),
                }
    for number, spans in attempts.items():
        begin = min(span.begin for span in spans)
        mark = {"ph": "i", "s": "g", "name": f"attempt {number}", "pid": 1, "tid": 0}
        yield mark | {"ts": MICROSECONDS * (begin - origin)}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over lanes. In each lane, any two spans are nested or disjoint, as trace viewers require."""
    lane_spans: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        lane = next((lane for lane, stack in enumerate(open_spans) if _fits(stack, span)), len(lane_spans))
        if lane == len(lane_spans):
            lane_spans.append([])
            open_spans.append([])
        lane_spans[lane].append(span)
        open_spans[lane].append(span)
    return lane_spans


def _fits(stack: list[Span], span: Span) -> bool:
    """Remove finished spans from `stack`. Return whether `span` lies inside the innermost open span, or whether no span
    is open."""
    while stack and stack[-1].end <= span.begin:
        stack.pop()
    return not stack or span.end <= stack[-1].end


def _metadata(kind: str, pid: int, tid: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _natural(name: str) -> Sequence[tuple[int, str]]:
    """Return a sort key that compares numbers by value, so that rank 10 comes after rank 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
