"""Renders a run's time ledger for the report: a stacked bar over time, and a table of causes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from megarl.run.time_causes import of_cause
from megarl.run.time_ledger import TimeLedger, goodput

BINS = 120
WIDTH, HEIGHT, AXIS = 1050, 130, 20

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sampling, rewards and training": ("--series-1", ("rollout", "reward", "train")),
    "waiting within steps": ("--series-2", ("long_rollouts", "idle_trainers", "idle_engines", "driver")),
    "weight sync, evaluation, checkpoints": ("--series-3", ("refit", "evaluation", "checkpoint")),
    "start-up and end": ("--series-4", ("startup", "finish")),
    "failures": ("--bad", ("detection", "restart", "repeated")),
    "queue and spare": ("--series-5", ("queue", "spare")),
    "not recorded": ("--warn", ("unexplained",)),
}
"""Group of causes -> its color, and its causes."""


def render_time(ledger: TimeLedger) -> str:
    """Return the section's HTML, or an empty string if the run has no records of its time."""
    seconds = ledger.seconds
    if not sum(seconds.values()):
        return ""
    note = (
        f"Completed steps took {100 * goodput(seconds):.1f} % of the allocated time. Each second of each device belongs"
        " to one cause. Time between allocations is excluded."
    )
    return f'<h2>Time</h2><p class="note">{note}</p>{_legend(ledger)}{_bars(ledger)}{_table(ledger)}'


def _used_groups(ledger: TimeLedger) -> dict[str, tuple[str, tuple[str, ...]]]:
    seconds = ledger.seconds
    return {name: group for name, group in GROUPS.items() if any(of_cause(seconds, cause) for cause in group[1])}


def _legend(ledger: TimeLedger) -> str:
    marks = (
        f'<span class="line"><span class="mark" style="background: var({color})"></span>{name}</span>'
        for name, (color, _) in _used_groups(ledger).items()
    )
    return f'<div class="lines">{"".join(marks)}</div>'


def bins(ledger: TimeLedger, count: int = BINS) -> list[dict[str, float]]:
    """Divide the allocated time into bins of equal length. Return each bin's device-seconds by cause."""
    total = sum(interval.end - interval.begin for interval in ledger.intervals)
    width, at = total / count, 0.0
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for interval in ledger.intervals:
        length = interval.end - interval.begin
        first, last = (min(count - 1, int(time / width)) for time in (at, at + length))
        for number in range(first, last + 1):
            overlap = min(at + length, (number + 1) * width) - max(at, number * width)
            for cause, seconds in interval.seconds.items():
                share = max(0.0, overlap) / length * seconds
                found[number][cause] = found[number].get(cause, 0.0) + share
        at += length
    return found


def _bars(ledger: TimeLedger) -> str:
    """Draw a bar per bin, stacked from the bottom in the order of the groups."""
    shapes, width = [], WIDTH / BINS
    for number, seconds in enumerate(bins(ledger)):
        total, bottom = sum(seconds.values()), float(HEIGHT)
        for name, (color, causes) in GROUPS.items():
            part = sum(of_cause(seconds, cause) for cause in causes)
            if total and part > 0:
                height = HEIGHT * part / total
                bottom -= height
                shapes.append(
                    f'<rect x="{number * width:.2f}" y="{bottom:.2f}" width="{width:.2f}" height="{height:.2f}" '
                    f'fill="var({color})"><title>{escape(name)}: {100 * part / total:.1f} %</title></rect>'
                )
    hours = sum(interval.end - interval.begin for interval in ledger.intervals) / 3600
    for i in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[i]
        shapes.append(
            f'<text x="{WIDTH * i / 4:.0f}" y="{HEIGHT + AXIS - 5}" text-anchor="{anchor}" font-size="12" '
            f'fill="var(--muted)">{hours * i / 4:.3g} h</text>'
        )
    label = "Share of the devices by cause over the allocated time"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT + AXIS}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _table(ledger: TimeLedger) -> str:
    head = ["", "Cause", "Device-hours", "Share", "Seconds per step"]
    head += ["Planned"] if ledger.predicted else []
    colors = {cause: color for color, causes in GROUPS.values() for cause in causes}
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>"]
    for row in ledger.rows():
        mark = f'<span class="mark" style="background: var({colors[row.cause]})"></span>'
        step_s, planned_s = ("–" if value is None else f"{value:.2f}" for value in (row.step_s, row.planned_s))
        cells = [f"{row.device_hours:,.2f}", f"{100 * row.share:.1f} %", step_s]
        cells += [planned_s] if ledger.predicted else []
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        lines.append(f"<tr><td>{mark}{row.cause}</td><td>{escape(row.meaning)}</td>{numbers}</tr>")
    return f"<table>{''.join(lines)}</table>"
