"""The cost of a large run's plan: seconds of one core to make and to send it, as arrays and as objects.

.venv/bin/python tools/benchmarks/plan.py --out tools/benchmarks/results/plan.json
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from machine import machine, machine_cpu_seconds
from ray import cloudpickle
from reshard import CASES, CONFIGS, Case
from rich.console import Console
from rich.table import Table

from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.planning.side import on_nodes, side_holders

RANKS_PER_NODE = 8

Result = TypeVar("Result")


@dataclass
class Laps:
    """The seconds of one core that each thing took, by its name."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, function: Callable[..., Result], *args: Any) -> Result:
        start = time.process_time()
        result = function(*args)
        self.seconds[name] = time.process_time() - start
        return result


def main() -> None:
    arguments = _parse()
    start, before, own_before = time.perf_counter(), machine_cpu_seconds(), time.process_time()
    measured = measure(CASES[arguments.case])
    elsewhere = machine_cpu_seconds() - before - (time.process_time() - own_before)
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "cpu_percent_elsewhere": 100 * elsewhere / ((time.perf_counter() - start) * os.cpu_count()),
        **CASES[arguments.case]._asdict(),
        **measured,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result)
    print(f"result: {arguments.out}")


def measure(case: Case) -> dict[str, Any]:
    """A plan as it is made, as the driver sends it, and as the first engine's first worker and the first trainer rank
    take their parts of it; and how the same goes where it is sent as objects."""
    lap, config = Laps(), CONFIGS[case.model] | {"dtype": "bfloat16"}
    sources = lap("describe sources", side_holders, "--from", case.source, config, True)
    wanting = lap("describe destinations", side_holders, "--to", case.destination, config, False)
    sources = on_nodes(sources, RANKS_PER_NODE)
    destinations = on_nodes(wanting, RANKS_PER_NODE, first=sources[-1].node + 1)
    plan = lap("order", ordered, lap("plan", make_plan, sources, destinations))
    compact = lap("to arrays", CompactPlan.of, plan)
    lap("part of an engine's worker", compact.part, [destinations[0].name])
    lap("part of a trainer's rank", compact.part, [sources[0].name])
    sent = {
        "arrays": compact,
        "objects": plan,
        "objects of an engine": compact.part([h.name for h in destinations if h.node == destinations[0].node]),
        "destinations' holders": destinations,
        "all holders": [*sources, *destinations],
    }
    sizes = {}
    for name, what in sent.items():
        data = lap(f"pickle {name}", cloudpickle.dumps, what)
        lap(f"unpickle {name}", pickle.loads, data)
        sizes[name] = len(data)
    counts = {
        "holders": len(plan.holders),
        "buckets": len(plan.buckets),
        "moves": len(compact.moves),
        "terms": len(compact.terms),
        "hops": len(plan.order),
    }
    return {"counts": counts, "cpu_seconds": lap.seconds, "megabytes": {k: v / 1e6 for k, v in sizes.items()}}


def show(result: dict[str, Any]) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in result["counts"].items())
    print(f"{result['model']}, {result['source']} to {result['destination']}: {counts}")
    table = Table()
    for column in ("", "CPU s", "MB"):
        table.add_column(column)
    for name, seconds in result["cpu_seconds"].items():
        size = result["megabytes"].get(name.removeprefix("pickle "))
        table.add_row(name, f"{seconds:.2f}", "" if size is None else f"{size:.1f}")
    Console().print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="deepseek-v3", help="a model and its layouts")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
