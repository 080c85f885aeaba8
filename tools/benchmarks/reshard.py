"""`megarl reshard` on published models and layouts: seconds and memory to plan and prove, and what the plan costs.

.venv/bin/python tools/benchmarks/reshard.py --out tools/benchmarks/results/reshard.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from machine import children_cpu_seconds, machine, machine_cpu_seconds
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the shapes of published models are those that the tests have

from tests.published_models import CONFIGS  # noqa: E402

TARGET_SECONDS, TARGET_GB, TARGET_BALANCE, TARGET_RATIO = 60, 4, 1.05, 1.15


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
"""The layouts of Qwen3-235B are those that these trainers publish for it."""


def main() -> None:
    arguments = _parse()
    wanted = arguments.only or list(CASES)
    start, before, own_before = time.perf_counter(), machine_cpu_seconds(), time.process_time()
    runs = {name: run(CASES[name]) for name in wanted}
    elsewhere = machine_cpu_seconds() - before - (time.process_time() - own_before) - children_cpu_seconds()
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "cpu_percent_elsewhere": 100 * elsewhere / ((time.perf_counter() - start) * os.cpu_count()),
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(runs)
    print(f"result: {arguments.out}")


def run(case: Case) -> dict[str, Any]:
    """One command, start-up included: its seconds on the clock and of one core, its peak memory, and what it says."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps(CONFIGS[case.model] | {"dtype": "bfloat16"}), encoding="utf-8")
        options = ["--model", str(config), "--from", case.source, "--to", case.destination, "--json"]
        options += ["--colocated"] if case.colocated else []
        command = [sys.executable, "-m", "megarl.cli", "reshard", *options]
        nothing_kept = {**os.environ, "MEGARL_CACHE": name}
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=nothing_kept, stdout=subprocess.PIPE, text=True)
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with exit code {process.returncode}")
    return {
        **case._asdict(),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "figures": json.loads(said),
    }


def show(runs: Mapping[str, Mapping[str, Any]]) -> None:
    targets = f"{TARGET_SECONDS} s, {TARGET_GB} GB, balance {TARGET_BALANCE}, over the floor {TARGET_RATIO}, wasted 0"
    table = Table(title=f"planned, proven and simulated; targets: {targets}")
    for column in ("", "s", "CPU s", "GB", "moved TB", "wasted", "balance", "predicted s", "over the floor"):
        table.add_column(column, no_wrap=True)
    for name, values in runs.items():
        found = values["figures"]
        table.add_row(
            name,
            f"{values['seconds']:.1f}",
            f"{values['cpu_seconds']:.1f}",
            f"{values['peak_gb']:.2f}",
            f"{found['bytes_total'] / 1e12:.2f}",
            str(found["bytes_wasted"]),
            f"{found['source_balance']:.3f}",
            f"{found['predicted_seconds']:.2f}",
            f"{found['predicted_seconds'] / found['floor_seconds']:.3f}",
        )
    Console(width=120).print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="one case; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
