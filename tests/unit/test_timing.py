"""Checks that all time limits of tests are defined in tests/timing.py."""

from __future__ import annotations

import re

from tests.paths import ROOT

LIMITS = [
    r"^\w+_S = [1-9][\d.]*$",
    r"\b(timeout_s|seconds)=\d{2,}",
    r"\btimeout=\d{2,}\b",
    r"\.(wait|join|poll|result)\((timeout=)?\d+\)",
    r"monotonic\(\) \+ \d{2,}",
    r"monotonic\(\) - \w+ <=? [\d.]+$",
    r"perf_counter\(\) - \w+ <",
]


def test_time_limits_are_defined_in_one_file() -> None:
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name not in ("timing.py", "test_timing.py")]
    offending = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if any(re.search(limit, line) for limit in LIMITS)
    ]
    assert offending == []
