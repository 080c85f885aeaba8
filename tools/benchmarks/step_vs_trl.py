"""Compare a quickstart step of megarl with TRL's GRPOTrainer: same recipe, prompts and machine, one after the other.

.venv/bin/python tools/benchmarks/step_vs_trl.py --steps 5 --out tools/benchmarks/results/step_vs_trl.json
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import QUICKSTART, option, read_metrics, run_benchmark, run_logged, train

from megarl.config.load import load
from megarl.models.folder import resolve

PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19", "xxhash==4.1.0")
"""Packages of TRL beyond the project's, without dependencies: both sides run on the same torch and transformers."""

LINK = "import site; site.addsitedir({packages!r})\nimport sys; sys.modules['vllm'] = None\n"
"""Python runs these lines at start. Without them TRL would import vLLM, and its memory would count for TRL."""

TIMES = ("step", "rollout", "reward", "train", "refit")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("step_vs_trl: error: terminated"))
    config = load(QUICKSTART)
    samples_per_step = config.batch.prompts_per_step * config.batch.samples_per_prompt
    if arguments.steps < 2 or any(samples_per_step % size for size in arguments.trl_microbatch):
        sys.exit(f"step_vs_trl: error: give at least 2 steps, and microbatches that divide {samples_per_step} samples")
    resolve(config.model.path)  # a first conversion of the model would count as start-up
    with tempfile.TemporaryDirectory(prefix="step-vs-trl-") as name:
        work = Path(name)
        python = build_environment(work / "environment")
        megarl = measure_megarl(arguments.steps, work)
        trl = [measure_trl(python, arguments.steps, size, work) for size in arguments.trl_microbatch]
    fastest = min(trl, key=lambda side: side["median_seconds"]["step"])
    return {
        "cpu_percent_elsewhere": max(side["cpu_percent_elsewhere"] for side in (megarl, fastest)),
        "recipe": config.model_dump(),
        "ratio_of_median_steps": megarl["median_seconds"]["step"] / fastest["median_seconds"]["step"],
        "megarl": megarl,
        "trl": fastest,
        "trl_slower_settings": [side for side in trl if side is not fastest],
    }


def build_environment(folder: Path) -> Path:
    """Create an environment with TRL on top of this environment's packages, and return its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    link = LINK.format(packages=sysconfig.get_path("purelib"))
    next(folder.glob("lib/python*/site-packages")).joinpath("project.pth").write_text(link, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *PACKAGES], check=True)
    return python


def measure_megarl(steps: int, work: Path) -> dict[str, Any]:
    lines, conditions = train(work, QUICKSTART, f"run.steps={steps}")
    manifest = json.loads((work / "run" / "manifest.json").read_text(encoding="utf-8"))
    return {"versions": manifest["versions"], "git": manifest["git"], **conditions, **summary(lines)}


def measure_trl(python: Path, steps: int, microbatch: int, work: Path) -> dict[str, Any]:
    folder = work / f"trl-{microbatch}"
    folder.mkdir()
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(folder), str(steps), str(microbatch)]
    conditions = run_logged(command, log=folder / "log")
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return {**facts, **conditions, **summary(read_metrics(folder))}


def summary(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return all steps, and medians that exclude the first step, which warms up caches and memory pools."""
    steps = [_step(line) for line in lines]
    return {
        "median_seconds": {name: median(step["seconds"][name] for step in steps[1:]) for name in steps[0]["seconds"]},
        "median_tokens": median(step["tokens"] for step in steps[1:]),
        "peak_pss_gb": steps[-1]["peak_pss_gb"],
        "steps": steps,
    }


def _step(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": {name: metrics[f"time/{name}"] for name in TIMES if f"time/{name}" in metrics},
        "reward": metrics["reward/mean"],
        "tokens": round(metrics["throughput/tokens_per_second"] * metrics["time/step"]),
        "response_length_mean": metrics["response/length_mean"],
        "peak_pss_gb": metrics["memory/peak_pss_gb"],
    }


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--steps", type=int, default=5, help="steps of each side, at least 2 (%(default)s)"),
        option(
            "--trl-microbatch",
            type=int,
            nargs="+",
            default=[16],
            metavar="SAMPLES",
            help="per_device_train_batch_size; several are run one by one, and the fastest counts (16)",
        ),
    )
