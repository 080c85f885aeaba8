"""Measure `megarl reshard` on published models and layouts: time and memory to plan and verify, and the plan's costs.

.venv/bin/python tools/benchmarks/reshard.py --out tools/benchmarks/results/reshard.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from benchmark import ROOT, option, run_benchmark, run_megarl

from tests.published_models import CONFIGS

CASES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tools/benchmarks/cases/reshard.yaml").read_text())


def run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Run one command. Return its wall-clock and CPU seconds, including start-up, its peak memory, and its output."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps(CONFIGS[case["model"]] | {"dtype": "bfloat16"}), encoding="utf-8")
        options = ["--model", config, "--from", case["source"], "--to", case["destination"], "--json"]
        options += ["--colocated"] if case.get("colocated") else []
        costs, output = run_megarl("reshard", *options, environment={"MEGARL_CACHE": name})  # an empty cache
    return {"colocated": False, **case, **costs, "figures": json.loads(output)}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments: {"runs": {name: run(CASES[name]) for name in arguments.only or CASES}},
        option("--only", choices=CASES, action="append", help="run only this case; may be repeated"),
    )
