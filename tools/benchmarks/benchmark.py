"""The command line of a benchmark: options, the state of the machine, and the JSON result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tests.*, whose models and shapes benchmarks share

BASE, QUICKSTART = ROOT / "configs" / "base.yaml", ROOT / "configs" / "quickstart.yaml"

QUIET_PERCENT = 5.0
"""Percentage of the machine's CPU time used by other processes above which figures are unreliable."""

Result = TypeVar("Result")

Option = tuple[str, dict[str, Any]]


def option(name: str, **settings: Any) -> Option:
    """Return a benchmark's option. The arguments are those of ArgumentParser.add_argument."""
    return name, settings


def parse(description: str, *options: Option) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("result.json"), help="JSON file to write (%(default)s)")
    for name, settings in options:
        parser.add_argument(name, **settings)
    return parser.parse_args()


def run_benchmark(
    description: str, measure: Callable[[argparse.Namespace], Mapping[str, Any]], *options: Option
) -> None:
    """Parse the options, call measure(options), and write the result with the state of the machine."""
    arguments = parse(description, *options)
    write(measured(lambda: measure(arguments)), arguments.out)


def measured(measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of `measure`, with the date, the machine, and the percentage of CPU time that other processes
    used, unless the figures contain them."""
    start, machine_before, process_before = time.perf_counter(), machine_cpu_seconds(), own_cpu_seconds()
    figures = measure()
    others = machine_cpu_seconds() - machine_before - (own_cpu_seconds() - process_before)
    percent = 100 * max(0.0, others) / ((time.perf_counter() - start) * os.cpu_count())
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"date": date, "machine": machine(), "cpu_percent_elsewhere": percent, **figures}


def write(result: Mapping[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"result: {out}; figures.py shows the tables")
    if (percent := result["cpu_percent_elsewhere"]) > QUIET_PERCENT:
        print(f"warning: other processes used {percent:.0f} % of the CPU time; measure on a quiet machine")


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
    """Return the CPU time of all processes on all cores."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # user and nice contain guests


def children_cpu_seconds() -> float:
    """Return the CPU time of this process's exited children and of the descendants that they waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def own_cpu_seconds() -> float:
    return time.process_time() + children_cpu_seconds()


@dataclass
class Laps:
    """Records the CPU seconds of this process by task."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, function: Callable[..., Result], *args: Any) -> Result:
        start = time.process_time()
        result = function(*args)
        self.seconds[name] = time.process_time() - start
        return result
