"""Checks of the metrics that runs write."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.core.metric_names import is_declared

MEASURED = ("time/", "idle/", "memory/", "throughput/", "checkpoint/", "goodput/", "cluster/")
"""Prefixes of the metrics that differ between any two runs."""


def complete_rows(file: Path) -> list[dict]:
    """Return the objects in a JSONL file, if it exists. A partial last line is ignored: a run is writing it, or was
    killed."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def undeclared(file: Path) -> list[str]:
    """Return the names in metrics.jsonl that megarl/core/metric_names.py does not declare."""
    rows = complete_rows(file)
    return sorted(name for name in set().union(*rows) - {"step", "nonfinite"} if not is_declared(name))
