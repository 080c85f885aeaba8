"""Exports a run's trace as Chrome trace events for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megarl.cluster.trace import DRIVER, FILE, Span, read_spans
from megarl.core.errors import UserError
from megarl.core.files import numbered, replacement
from megarl.run.folder import ATTEMPT

STEP = re.compile(r"step \d+")
MICROSECONDS = 1e6


def write(run: Path, out: Path | None = None) -> Path:
    """Write a trace that covers all attempts of a run, and return its path. Raise a UserError if the run has no trace.
    out: file to write. Default: trace.json in the run folder."""
    attempts = {}
    for number, logs in numbered(run / "logs", ATTEMPT).items():
        if spans := list(read_spans(logs)):
            attempts[number] = spans
    if not attempts:
        place = f"{run}: logs/{ATTEMPT.format(1)}/{FILE}"
        raise UserError(f"{place} contains no tasks. Fix: pass a run folder such as runs/latest")
    out = run / "trace.json" if out is None else out
    with replacement(out) as file:  # write event by event, because a million events take a gigabyte
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events(attempts)):
            file.write((",\n" * (number > 0) + json.dumps(event)).encode())
        file.write(b"]}\n")
    return out


def events(attempts: dict[int, list[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the events of each process, starting with the driver, and a mark at the start of each attempt. Concurrent
    tasks in the same process are shown in separate rows."""
    by_process: defaultdict[str, list[Span]] = defaultdict(list)
    for span in chain.from_iterable(attempts.values()):
        by_process[span.process].append(span)
    origin = min(span.begin for span in chain.from_iterable(attempts.values()))
    names = sorted(by_process, key=lambda name: (name != DRIVER, _natural(name)))
    for pid, name in enumerate(names, start=1):
        yield _metadata("process_name", pid, name=name)
        yield _metadata("process_sort_index", pid, sort_index=pid)
        for lane, spans in enumerate(lanes(by_process[name])):
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
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts)]
