"""A quickstart step of megarl against TRL's GRPOTrainer: same recipe, same prompts, same machine, one after the other.

.venv/bin/python tools/benchmarks/step_vs_trl.py --steps 5 --out tools/benchmarks/results/step_vs_trl.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from machine import QUIET_PERCENT, machine, machine_cpu_seconds
from rich.console import Console
from rich.table import Table
from trl_environment import build

from megarl.cluster.placement import place
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.models.folder import resolve

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "quickstart.yaml"
TIMES = ("step", "rollout", "reward", "train", "refit")
START_TIMEOUT_S = 900
STEP_TIMEOUT_S = 600
LOOK_S = 0.5


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("step_vs_trl: error: terminated"))
    config = load(RECIPE)
    arguments = _parse(config.batch.prompts_per_step * config.batch.samples_per_prompt)
    resolve(config.model.path)  # a conversion, which only the first run on a machine needs, would count as start-up
    with tempfile.TemporaryDirectory(prefix="step-vs-trl-") as name:
        work = Path(name)
        trl_python = build(work / "environment")
        megarl = measure_megarl(config, arguments.steps, work)
        trl = [measure_trl(trl_python, arguments.steps, size, work) for size in arguments.trl_microbatch]
    fastest = min(trl, key=lambda side: side["median_seconds"]["step"])
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "recipe": config.model_dump(),
        "ratio_of_median_steps": megarl["median_seconds"]["step"] / fastest["median_seconds"]["step"],
        "megarl": megarl,
        "trl": fastest,
        "trl_slower_settings": [side for side in trl if side is not fastest],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result)
    print(f"result: {arguments.out}")
    for name, side in (("megarl", megarl), ("TRL", fastest)):
        if side["cpu_percent_elsewhere"] > QUIET_PERCENT:
            share = f"{side['cpu_percent_elsewhere']:.0f} %"
            print(f"warning: {share} of the CPU time during {name}'s side went elsewhere; measure on a quiet machine")


def measure_megarl(config: Config, steps: int, work: Path) -> dict[str, Any]:
    overrides = [f"run.steps={steps}", "run.export=false", f"run.folder={work}", "run.name=megarl", "run.replace=true"]
    command = [sys.executable, "-m", "megarl.cli", "train", str(RECIPE), *overrides]
    conditions = run(command, steps, work / "megarl.log")
    manifest = json.loads((work / "megarl" / "manifest.json").read_text(encoding="utf-8"))
    settings = {
        "tokens_per_microbatch": config.actor.tokens_per_microbatch,
        "dtype": config.model.dtype,
        "processes": place(config).describe(),
    }
    facts = {"settings": settings, "versions": manifest["versions"], "git": manifest["git"]}
    return {**facts, **conditions, **summary(work / "megarl" / "metrics.jsonl")}


def measure_trl(python: Path, steps: int, microbatch: int, work: Path) -> dict[str, Any]:
    folder = work / f"trl-{microbatch}"
    folder.mkdir()
    options = ["--steps", str(steps), "--microbatch", str(microbatch)]
    command = [str(python), str(Path(__file__).with_name("trl_step.py")), str(RECIPE), str(folder), *options]
    conditions = run(command, steps, folder / "log")
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return {**facts, **conditions, **summary(folder / "metrics.jsonl")}


def run(command: Sequence[str], steps: int, log: Path) -> dict[str, float]:
    """Runs one side to its end. Says how long it took in all, and what share of the machine's CPU time went elsewhere
    meanwhile (to other processes and, on a virtual machine, to its neighbours)."""
    print(f"running: {' '.join(command)}", flush=True)
    start, machine_before = time.perf_counter(), machine_cpu_seconds()
    status, own = _carried_out(command, log, START_TIMEOUT_S + steps * STEP_TIMEOUT_S)
    if status != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        sys.exit(f"{tail}\nstep_vs_trl: error: exit status {status} of {' '.join(command)}")
    seconds = time.perf_counter() - start
    elsewhere = machine_cpu_seconds() - machine_before - own
    return {
        "seconds_with_start_and_end": seconds,
        "cpu_percent_elsewhere": 100 * elsewhere / (seconds * psutil.cpu_count()),
    }


def summary(metrics: Path) -> dict[str, Any]:
    """The steps, and medians of all but the first, in which caches and memory pools are still filled."""
    steps = [_step(json.loads(line)) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "median_seconds": {name: median(step["seconds"][name] for step in steps[1:]) for name in steps[0]["seconds"]},
        "median_tokens": median(step["tokens"] for step in steps[1:]),
        "peak_pss_gb": steps[-1]["peak_pss_gb"],
        "steps": steps,
    }


def show(result: Mapping[str, Any]) -> None:
    megarl, trl, facts = result["megarl"], result["trl"], result["machine"]
    microbatch = trl["settings"]["microbatch"]
    table = Table(
        "",
        "megarl",
        f"TRL {trl['versions']['trl']}",
        "megarl / TRL",
        title=f"{facts['cores']} cores of {facts['cpu']}, {facts['memory_gb']} GB",
        caption=f"seconds; medians leave out the first step; TRL's per_device_train_batch_size is {microbatch}",
    )
    table.add_row("first step", *_compared(megarl["steps"][0]["seconds"]["step"], trl["steps"][0]["seconds"]["step"]))
    for name in TIMES:
        title = "median step" if name == "step" else f"  {name}"
        table.add_row(title, *_compared(megarl["median_seconds"].get(name), trl["median_seconds"].get(name)))
    table.add_row("tokens in a step", *_compared(megarl["median_tokens"], trl["median_tokens"]))
    table.add_row("peak memory, GB of PSS", *_compared(megarl["peak_pss_gb"], trl["peak_pss_gb"]))
    table.add_row("reward, first to last step", _rewards(megarl), _rewards(trl), "")
    for side in result["trl_slower_settings"]:
        title = f"median step, TRL with {side['settings']['microbatch']}"
        table.add_row(title, *_compared(megarl["median_seconds"]["step"], side["median_seconds"]["step"]))
    Console().print(table)


def _parse(samples_per_step: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of each side, at least 2 (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--trl-microbatch",
        type=int,
        nargs="+",
        default=[16],
        metavar="SAMPLES",
        help="TRL's per_device_train_batch_size; several are run one by one, and the fastest counts (default: 16)",
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first step is left out of the median; give at least 2")
    for size in arguments.trl_microbatch:
        if size < 1 or samples_per_step % size:
            parser.error(f"--trl-microbatch {size} does not divide the {samples_per_step} samples of a step")
    return arguments


def _carried_out(command: Sequence[str], log: Path, timeout_s: float) -> tuple[int, float]:
    """Its exit status, and the CPU seconds of its processes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
        spent: dict[psutil.Process, float] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                spent |= _cpu_seconds(process.pid)
                time.sleep(LOOK_S)
            return process.wait(0), sum(spent.values())
        finally:  # also after Ctrl-C, which its own process group keeps from it, SIGTERM and the deadline
            process.terminate()
            process.wait()


def _cpu_seconds(pid: int) -> dict[psutil.Process, float]:
    """Returns the CPU seconds of a process and of its descendants. What nobody waits for, such as a process that ends
    with its parent, is in no account of ended children."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process] = times.user + times.system
    return found


def _step(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": {name: metrics[f"time/{name}"] for name in TIMES if f"time/{name}" in metrics},
        "reward": metrics["reward/mean"],
        "tokens": round(metrics["throughput/tokens_per_second"] * metrics["time/step"]),
        "response_length_mean": metrics["response/length_mean"],
        "peak_pss_gb": metrics["memory/peak_pss_gb"],
    }


def _compared(megarl: float | None, trl: float | None) -> tuple[str, str, str]:
    ratio = "" if not megarl or not trl else f"{megarl / trl:.2f}"
    return _number(megarl), _number(trl), ratio


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _rewards(side: Mapping[str, Any]) -> str:
    return f"{side['steps'][0]['reward']:.2f} → {side['steps'][-1]['reward']:.2f}"


if __name__ == "__main__":
    main()
