"""Measure `megarl reshard` on published models and layouts: time and memory to plan and verify, and the plan's costs.

.venv/bin/python tools/benchmarks/reshard.py --out tools/benchmarks/results/reshard.json
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmark import option, run_benchmark, run_megarl

from tests.published_models import CONFIGS


class Case(NamedTuple):
    model: str
    source: str
    destination: str
    colocated: bool = False


QWEN = "Qwen3-235B-A22B"
CASES = {
    "deepseek-v3": Case("DeepSeek-V3", "tp=8,pp=16,ep=32,etp=1,dp=4,last_stage_layers=1", "vllm:tp=8,replicas=32"),
    "deepseek-v3-whole-experts": Case(
        "DeepSeek-V3", "tp=8,pp=16,ep=32,etp=1,dp=4,last_stage_layers=1", "vllm:tp=8,replicas=32,ep=true"
    ),
    "llama-3.1-405b": Case(
        "Llama-3.1-405B", "tp=8,pp=16,dp=8,first_stage_layers=7,last_stage_layers=7", "vllm:tp=8,replicas=64"
    ),
    "qwen3-235b-nemo-rl-16-nodes": Case(
        QWEN,
        "tp=2,pp=8,cp=2,ep=16,etp=1,dp=4,first_stage_layers=11,last_stage_layers=11",
        "vllm:tp=16,replicas=8",
    ),
    "qwen3-235b-nemo-rl-32-nodes": Case(
        QWEN, "tp=4,pp=8,ep=16,etp=1,dp=4,first_stage_layers=11,last_stage_layers=11", "vllm:tp=8,replicas=16"
    ),
    "qwen3-235b-slime": Case(QWEN, "tp=4,pp=4,cp=2,ep=16,etp=1,dp=2,last_stage_layers=22", "vllm:tp=32,replicas=2"),
    "qwen3-235b-verl": Case(
        QWEN, "tp=4,pp=8,ep=4,etp=1,first_stage_layers=11,last_stage_layers=11", "vllm:tp=8,replicas=4"
    ),
    "qwen3-235b-verl-colocated": Case(
        QWEN, "tp=4,pp=8,ep=4,etp=1,first_stage_layers=11,last_stage_layers=11", "vllm:tp=8,replicas=4", colocated=True
    ),
}
"""The layouts of Qwen3-235B are those published by the named trainers."""


def run(case: Case) -> dict[str, Any]:
    """Run one command. Return its wall-clock and CPU seconds, including start-up, its peak memory, and its output."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps(CONFIGS[case.model] | {"dtype": "bfloat16"}), encoding="utf-8")
        options = ["--model", config, "--from", case.source, "--to", case.destination, "--json"]
        options += ["--colocated"] if case.colocated else []
        costs, output = run_megarl("reshard", *options, environment={"MEGARL_CACHE": name})  # an empty cache
    return {**case._asdict(), **costs, "figures": json.loads(output)}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments: {"runs": {name: run(CASES[name]) for name in arguments.only or CASES}},
        option("--only", choices=CASES, action="append", help="run only this case; may be repeated"),
    )
