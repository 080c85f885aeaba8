"""Checks of the metrics that runs write."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.core.metric_names import is_declared

MEASURED = ("time/", "idle/", "memory/", "throughput/", "checkpoint/", "goodput/", "cluster/")
"""Prefixes of the metrics that differ between any two runs."""


def undeclared(file: Path) -> list[str]:
    """Return the names in metrics.jsonl that megarl/core/metric_names.py does not declare. A partial last line, which a
    killed run can leave, is ignored."""
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(name for name in set().union(*rows) - {"step", "nonfinite"} if not is_declared(name))
