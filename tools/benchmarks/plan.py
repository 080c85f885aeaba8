"""Measure the CPU seconds to make a large run's refit plan and to send it, as arrays and as objects.

.venv/bin/python tools/benchmarks/plan.py --out tools/benchmarks/results/plan.json
"""

from __future__ import annotations

import pickle
from typing import Any

from benchmark import Laps, option, run_benchmark
from ray import cloudpickle
from reshard import CASES, CONFIGS, Case

from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.planning.side import on_nodes, side_holders

RANKS_PER_NODE = 8


def measure(case: Case) -> dict[str, Any]:
    """Measure making a plan, sending it as the driver does, and extracting the parts of the first engine's first worker
    and of the first trainer rank; for comparison, measure sending it as objects."""
    lap, config = Laps(), CONFIGS[case.model] | {"dtype": "bfloat16"}
    sources = lap("describe sources", side_holders, "--from", case.source, config, True)
    destinations = lap("describe destinations", side_holders, "--to", case.destination, config, False)
    sources = on_nodes(sources, RANKS_PER_NODE)
    destinations = on_nodes(destinations, RANKS_PER_NODE, first=sources[-1].node + 1)
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
    for name, value in sent.items():
        data = lap(f"pickle {name}", cloudpickle.dumps, value)
        lap(f"unpickle {name}", pickle.loads, data)
        sizes[name] = len(data)
    counts = {
        "holders": len(plan.holders),
        "buckets": len(plan.buckets),
        "moves": len(compact.moves),
        "terms": len(compact.terms),
        "hops": len(plan.order),
    }
    return {
        **case._asdict(),
        "counts": counts,
        "cpu_seconds": lap.seconds,
        "megabytes": {k: v / 1e6 for k, v in sizes.items()},
    }


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments: measure(CASES[arguments.case]),
        option("--case", choices=CASES, default="deepseek-v3", help="a model and its layouts"),
    )
