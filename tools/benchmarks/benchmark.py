"""The command line of a benchmark: its options, samples, processes and JSON result, and the state of the machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks use models and shapes of tests.*

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Lengths, Packing, schedule

BASE, QUICKSTART = ROOT / "configs" / "base.yaml", ROOT / "configs" / "quickstart.yaml"

QUIET_PERCENT = 5.0
"""Percentage of the machine's CPU time used by other processes above which figures are unreliable."""

TIMEOUT_S = 7200
MEGARL = (sys.executable, "-m", "megarl.cli")

Result = TypeVar("Result")
Measure = Callable[[argparse.Namespace, Path], Mapping[str, Any]]


def run_benchmark(
    description: str, measure: Measure | Mapping[str, Measure], *options: tuple[str, dict[str, Any]]
) -> None:
    """Parse the command line, measure, and write the figures with the date, the machine, and the percentage of CPU time
    that other processes used, unless the figures contain them.

    Args:
        measure: returns the figures, given the options and a temporary folder. If it is a mapping, the command line
            selects one of its functions by name.
        options: arguments of ArgumentParser.add_argument.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("result.json"), help="JSON file to write (%(default)s)")
    if isinstance(measure, Mapping):
        parser.add_argument("what", choices=measure)
    for name, settings in options:
        parser.add_argument(name, **settings)
    arguments = parser.parse_args()
    start, machine_before, process_before = time.perf_counter(), machine_cpu_seconds(), own_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
        figures = (measure[arguments.what] if isinstance(measure, Mapping) else measure)(arguments, Path(work))
    others = machine_cpu_seconds() - machine_before - (own_cpu_seconds() - process_before)
    percent = 100 * max(0.0, others) / ((time.perf_counter() - start) * os.cpu_count())
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    result = {"date": date, "machine": machine(), "cpu_percent_elsewhere": percent, **figures}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"result: {arguments.out}; figures.py shows the tables")
    if (percent := result["cpu_percent_elsewhere"]) > QUIET_PERCENT:
        print(f"warning: other processes used {percent:.0f} % of the CPU time; measure on a quiet machine")


def load_config(model: str | Path, settings: Mapping[str, Any]) -> Config:
    """Return the base recipe with a model, and with settings by dotted key."""
    settings = {"model.path": model, "data.source": "arithmetic", **settings}
    return load(BASE, [f"{key}={value}" for key, value in settings.items()])


def sample_of(
    name: str, prompt: Prompt, ids: Sequence[int], mask: Sequence[bool] | None = None, text: str = ""
) -> Sample:
    """Return a sample with a log-prob of -1 for each token. mask: whether the policy sampled a token (None: all)."""
    n = len(ids)
    return Sample(
        name, prompt, ids, [-1.0] * n, [True] * n if mask is None else mask, (VersionRun(0, n),), "stop", text
    )


def local_batches(samples: Sequence[Sample], rewards: Sequence[float], packing: Packing) -> list[LocalBatch]:
    """Return the batch of each data-parallel rank. The loss is a mean over response tokens, without a baseline."""
    weight = 1 / sum(len(sample.response_ids) for sample in samples)
    refs = [
        replace(SampleRef.of(sample, sample), scalar_reward=reward, weight=weight)
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    return [LocalBatch(refs, share) for share in schedule(list(map(Lengths.of, refs)), packing)]


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a new process, which has its own peak memory and all of the GPU's memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def train(folder: Path, recipe: Path, *keys: str) -> tuple[list[dict], dict[str, float]]:
    """Run `megarl train` with FOLDER/run as its folder. Return the metrics of every step, and run_logged's figures."""
    keys = (*keys, f"run.folder={folder}", "run.name=run", "run.export=false")
    figures = run_logged([*MEGARL, "train", str(recipe), *keys], log=folder / "megarl.log")
    return read_metrics(folder / "run"), figures


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def run_logged(
    *commands: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """Run commands concurrently, and exit with the end of their log if one fails. Return their seconds, and the
    percentage of the machine's CPU time that other processes used, including other virtual machines on the same
    host."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmark: error: terminated"))
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    start, machine_before, own = time.perf_counter(), machine_cpu_seconds(), {}
    children = []
    try:
        with log.open("w", encoding="utf-8") as file:
            for command in commands:
                print(f"running: {' '.join(command)}", flush=True)
                options = dict(cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, process_group=0)
                children.append(subprocess.Popen(command, **options))
        while None in (statuses := [child.poll() for child in children]) and not any(statuses):
            if time.perf_counter() - start > TIMEOUT_S:
                raise TimeoutError(f"{commands} did not finish within {TIMEOUT_S} s")
            for child in children:
                own |= _cpu_seconds(child.pid)
            time.sleep(0.5)
    finally:  # also after SIGTERM, a timeout, or Ctrl-C, which does not reach the children's groups
        for child in children:
            child.terminate()
            child.wait()
    if any(statuses):
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        sys.exit(f"{tail}\nbenchmark: error: exit status {statuses} of {commands}")
    seconds = time.perf_counter() - start
    elsewhere = machine_cpu_seconds() - machine_before - sum(own.values())
    return {
        "seconds_with_start_and_end": seconds,
        "cpu_percent_elsewhere": 100 * elsewhere / (seconds * os.cpu_count()),
    }


def _cpu_seconds(pid: int) -> dict[psutil.Process, float]:
    """Return the CPU seconds of a process and its descendants. The kernel's totals of exited children miss processes
    whose parent does not wait for them.
    """
    found = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process] = times.user + times.system
    return found


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
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # user and nice include guests


def own_cpu_seconds() -> float:
    """Return the CPU time of this process, its exited children and the descendants that they waited for."""
    return sum(os.times()[:4])
