"""Metric sinks: a JSONL file and the console.

Metric names have the form SECTION/NAME, such as reward/mean. Step numbers start at 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megarl.core.files import append_rows, retry_when_full


class JsonlSink:
    """A sink that appends one JSON object per step to a file. The first key is `step`. Because JSON has no NaN or
    infinity, such values are written as null, and their metrics are listed under "nonfinite". A write waits while the
    disk is full; see `retry_when_full`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        nonfinite = [name for name, value in metrics.items() if not math.isfinite(value)]
        record: dict[str, Any] = {"step": step, **metrics, **dict.fromkeys(nonfinite)}
        if nonfinite:
            record["nonfinite"] = nonfinite
        retry_when_full(lambda: append_rows(self._path, [record]), self._path)


COLUMNS = (  # title, minimum width, format
    ("ETA", 6, "{eta}"),
    ("reward±std", 12, "{reward/mean:.3f}±{reward/std:.3f}"),
    ("length", 7, "{response/length_mean:.1f}"),
    ("cut", 4, "{response/truncated_frac:.0%}"),
    ("entropy", 7, "{policy/entropy:.3f}"),
    ("|grad|", 7, "{policy/grad_norm:.3g}"),
    ("Δlogp", 7, "{mismatch/logprob_abs_mean:.1e}"),
    ("tok/s", 6, "{throughput/tokens_per_second:.0f}"),
    ("rollout", 7, "{time/rollout:.1f}s"),
    ("train", 7, "{time/train:.1f}s"),
    ("refit", 6, "{time/refit:.1f}s"),
    ("memory", 7, "{memory:.2f}GB"),
)
IMAGE_COLUMNS = (
    *COLUMNS[:2],
    *COLUMNS[4:7],
    ("img/s", 6, "{throughput/images_per_second:.2f}"),
    *COLUMNS[8:],
)
OFFLINE_COLUMNS = (
    ("ETA", 6, "{eta}"),
    ("loss", 8, "{loss:.4f}"),
    ("accuracy", 8, "{accuracy:.0%}"),
    ("margin", 8, "{preference/margin:.3f}"),
    ("entropy", 7, "{policy/entropy:.3f}"),
    ("|grad|", 7, "{grad_norm:.3g}"),
    ("tokens", 9, "{data/trained_tokens:,.0f}"),
    ("tok/s", 6, "{throughput/tokens_per_second:.0f}"),
    ("train", 7, "{time/train:.1f}s"),
    ("memory", 7, "{memory:.2f}GB"),
)
"""Columns for runs on offline data. `tokens` is the number of trained tokens."""

ALTERNATIVES = {
    "loss": ("policy/nll", "preference/loss", "label/loss"),
    "accuracy": ("preference/accuracy", "label/accuracy"),
    "grad_norm": ("policy/grad_norm", "reward_model/grad_norm"),
    "memory": ("memory/peak_rss_gb", "memory/peak_pss_gb"),  # PSS counts shared pages once
}
"""Metrics for cells that can show one of several metrics. A cell shows the last metric that is present."""

MISSING = "–"
HEADER_EVERY = 20  # number of lines between two headers
ETA_STEPS = 10  # averages few steps, because their duration drifts with response length


class ConsoleSink:
    """A sink that prints a line per step, and the header every HEADER_EVERY lines. Missing metrics are shown as "–".
    `cut` is the fraction of truncated responses. `Δlogp` is the mean |trainer log-prob − rollout log-prob| before the
    step's updates. For offline data, the first step's metrics determine the columns."""

    def __init__(
        self, total_steps: int, stream: TextIO | None = None, is_offline: bool = False, has_images: bool = False
    ) -> None:
        """`total_steps` determines the ETA. The default `stream` is sys.stdout."""
        self._columns = OFFLINE_COLUMNS if is_offline else IMAGE_COLUMNS if has_images else COLUMNS
        self._is_offline = is_offline
        self._total = total_steps
        self._stream = stream
        self._num_lines = 0
        self._step_times: deque[float] = deque(maxlen=ETA_STEPS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        cells: dict[str, Any] = dict(metrics)
        if "time/step" in metrics:
            self._step_times.append(metrics["time/step"])
            cells["eta"] = duration((self._total - step) * sum(self._step_times) / len(self._step_times))
        for cell, names in ALTERNATIVES.items():
            if values := [metrics[name] for name in names if name in metrics]:
                cells[cell] = values[-1]
        if self._is_offline and self._num_lines == 0:
            self._columns = [
                column for column in self._columns if column[0] == "ETA" or _cell(column[2], cells) != MISSING
            ]
        if self._num_lines % HEADER_EVERY == 0:
            self._print("step", [title for title, _, _ in self._columns])
        self._num_lines += 1
        self._print(f"{step}/{self._total}", [_cell(template, cells) for _, _, template in self._columns])

    def _print(self, first: str, cells: list[str]) -> None:
        widths = [width for _, width, _ in self._columns]
        line = [first.rjust(2 * len(str(self._total)) + 1)]
        line += [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        print(" ".join(line), file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Format a duration as 42s, 5m07s, 3h20m or 2d04h. Durations below 100 days take at most six characters."""
    if not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"


def _cell(template: str, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map(values)
    except KeyError:
        return MISSING
