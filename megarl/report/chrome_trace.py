"""The trace of a run as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing open."""

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
    """Write the trace of all attempts of the run in this folder; returns its path, trace.json in the folder where none
    is given. Raise UserError where there is no trace."""
    attempts = {
        number: spans for number, logs in numbered(run / "logs", ATTEMPT).items() if (spans := read_spans(logs / FILE))
    }
    if not attempts:
        raise UserError(f"{run}: no logs/{ATTEMPT.format(1)}/{FILE} with a task in it; give the folder of a run")
    out = run / "trace.json" if out is None else out
    replace_text(out, json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(attempts))}))
    return out


def read_spans(file: Path) -> list[Span]:
    """Return the spans of an attempt. The last line of one that was killed may be torn, and is left out."""
    rows = read_objects(file)[0] if file.exists() else []
    return [Span(**row) for row in rows]


def events(attempts: dict[int, list[Span]]) -> Iterator[dict[str, Any]]:
    """Yield a line of slices for each process, the driver's first, and marks where each attempt begins. Tasks of a
    process that ran side by side have lines of their own below it."""
    everything = [span for spans in attempts.values() for span in spans]
    origin = min(span.begin for span in everything)
    names = sorted({span.process for span in everything}, key=lambda name: (name != DRIVER, _natural(name)))
    for pid, name in enumerate(names, start=1):
        yield _named("process_name", pid, name=name)
        yield _named("process_sort_index", pid, sort_index=pid)
        for lane, spans in enumerate(lanes(span for span in everything if span.process == name)):
            if lane:
                yield _named("thread_name", pid, lane, name=f"beside ({lane})")
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
    """Return the spans in lines in which each two are nested or apart, as a line of slices shows them."""
    found: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        lane = next((lane for lane, stack in enumerate(open_spans) if _has_room(stack, span)), len(found))
        if lane == len(found):
            found.append([])
            open_spans.append([])
        found[lane].append(span)
        open_spans[lane].append(span)
    return found


def _has_room(stack: list[Span], span: Span) -> bool:
    """Return whether a span that begins now is inside of the last that is open, if one is. stack: the open ones."""
    while stack and stack[-1].end <= span.begin:
        stack.pop()
    return not stack or span.end <= stack[-1].end


def _named(what: str, pid: int, tid: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def _natural(name: str) -> Sequence[tuple[int, str]]:
    """Return a key by which rank 10 comes after rank 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
