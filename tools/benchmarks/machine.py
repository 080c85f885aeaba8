"""The machine that a benchmark ran on, and what else it did meanwhile."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

import psutil

QUIET_PERCENT = 5.0
"""The percentage of the machine's CPU time that others may have: above it, figures taken meanwhile are worth little."""


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def machine_cpu_seconds() -> float:
    """CPU time that the machine has spent on anything, on all cores together."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # user and nice contain guests


def children_cpu_seconds() -> float:
    """CPU time of this process's ended children, and of what they have waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
