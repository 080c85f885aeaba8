"""Simulate the goodput of runs on many GPUs whose failures occur at published rates, from measured recovery times.

.venv/bin/python tools/benchmarks/goodput.py --run RUN --out tools/benchmarks/results/goodput.json

RUN is the folder of a run that was killed and resumed at least once. The run's time ledger contains the seconds of a
restart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1]))  # for tools.benchmarks


from megarl.planner.goodput import FailureModel, predict_goodput, simulate_goodput
from megarl.run.time_records import ENDED, read_times
from tools.benchmarks.benchmark import load_config, run_benchmark

CASES = yaml.safe_load((FOLDER / "cases/goodput.yaml").read_text())
GPUS, TARGET = 1024, CASES["target"]
TOLERANCE = 0.007
"""Maximum difference between prediction and simulation, as a fraction of the allocated time."""
WHOLE, IN_PLACE = CASES["recoveries"]
START, RECOVERY = FOLDER / "results/start.json", FOLDER / "results/recovery.json"

MAX_SPARES = 80
"""Maximum number of spare nodes in the search for the best number."""

VARIED = {
    "failure rate": "rate",
    "detection": "detect_s",
    "restart": "restart_s",
    "time between copies": "interval_s",
    "time of a copy": "copy_s",
    "repair of a node": "repair_s",
    "wait for a node": "requeue_s",
}
"""Description -> field of FailureModel that the sensitivity analysis varies."""

FACTORS = (0.25, 4, 16)


def measured_restart(run: Path) -> dict[str, float]:
    """Return the mean seconds of a restart's parts, over the attempts that follow a failure."""
    attempts = read_times(run)
    restarts = [times for before, times in pairwise(attempts) if before.outcome != ENDED]
    parts: dict[str, float] = {}
    for times in restarts:
        for row in times.rows:
            for cause, seconds in row.seconds.items():
                start, _, part = cause.partition("/")
                if start == "startup":
                    parts[part] = parts.get(part, 0.0) + seconds / times.start.devices / len(restarts)
    if not parts:
        raise SystemExit(f"{run}: no attempt follows a failure. Fix: kill a run, resume it, and pass its folder")
    return {part: round(seconds, 2) for part, seconds in parts.items()}


def models(restart: Mapping[str, float]) -> dict[str, FailureModel]:
    """Return a failure model per kind of recovery, for GPUS devices with Llama 3's failure rate. A restart takes the
    measured time and the CPU time that the driver needs to start this many ranks."""
    from megarl.cluster.nodes.members import NODE_LOSS_S  # imports Ray

    driver_s = sum(json.loads(START.read_text())["driver_cpu_seconds"].values())
    hang_s = load_config("m", {}).cluster.timeouts.update
    seconds = {WHOLE: sum(restart.values()), IN_PLACE: json.loads(RECOVERY.read_text())["replacement_s"]}
    detect_s, rate = NODE_LOSS_S + CASES["hangs"]["share"] * hang_s, rates()["Llama 3"]
    return {
        name: FailureModel(GPUS, rate, detect_s=detect_s, restart_s=seconds[name] + driver_s, **settings)
        for name, settings in CASES["recoveries"].items()
    }


def rates() -> dict[str, float]:
    return {name: case["failures"] / case["gpu_hours"] for name, case in CASES["rates"].items()}


def with_best_spares(model: FailureModel) -> FailureModel:
    """Return the model with the number of spare nodes for which the goodput is highest."""
    candidates = (replace(model, spares=spares) for spares in range(MAX_SPARES + 1))
    return max(candidates, key=lambda candidate: predict_goodput(candidate)["kept"])


def both(model: FailureModel) -> dict[str, Any]:
    """Return the predicted and the simulated goodput, with the simulated share of each loss."""
    simulated = simulate_goodput(model)
    return {
        "spares": model.spares,
        "predicted": round(predict_goodput(model)["kept"], 5),
        "simulated": round(simulated.pop("kept"), 5),
        "losses": {cause: round(share, 5) for cause, share in simulated.items()},
    }


def most(model: FailureModel, field: str) -> float:
    """Return the factor by which a field may grow until the goodput falls below TARGET, at most 1000."""
    low, high = 1.0, 1000.0
    if predict_goodput(with_best_spares(scaled(model, field, high)))["kept"] >= TARGET:
        return high
    for _ in range(30):
        middle = (low * high) ** 0.5
        reaches = predict_goodput(with_best_spares(scaled(model, field, middle)))["kept"] >= TARGET
        low, high = (middle, high) if reaches else (low, middle)
    return round(low, 1)


def scaled(model: FailureModel, field: str, factor: float) -> FailureModel:
    return replace(model, **{field: getattr(model, field) * factor})


def figures(restart: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures, which depend only on the measured seconds of a restart's parts."""
    found: dict[str, Any] = {"measured_restart": dict(restart), "recoveries": {}}
    for name, model in models(restart).items():
        by_size = {
            of_rate: {gpus: both(with_best_spares(replace(model, devices=gpus, rate=rate))) for gpus in CASES["gpus"]}
            for of_rate, rate in rates().items()
        }
        sensitivity = {
            what: {
                "value": float(f"{getattr(model, field):.3g}"),
                **{
                    f"x {factor:g}": round(predict_goodput(with_best_spares(scaled(model, field, factor)))["kept"], 5)
                    for factor in FACTORS
                },
                "largest factor": most(model, field),
            }
            for what, field in VARIED.items()
        }
        spares = {count: round(predict_goodput(replace(model, spares=count))["kept"], 5) for count in range(5)}
        found["recoveries"][name] = {
            "detect_s": round(model.detect_s, 1),
            "restart_s": round(model.restart_s, 1),
            "interval_s": model.interval_s,
            "copy_s": model.copy_s,
            "by_size": {rate: {str(gpus): run for gpus, run in runs.items()} for rate, runs in by_size.items()},
            "sensitivity": sensitivity,
            "by_spares": {str(count): share for count, share in spares.items()},
        }
    runs = [
        run
        for recovery in found["recoveries"].values()
        for of_rate in recovery["by_size"].values()
        for run in of_rate.values()
    ]
    found["largest_difference"] = max(abs(run["predicted"] - run["simulated"]) for run in runs)
    return found


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments, _: figures(measured_restart(arguments.run)),
        ("--run", dict(type=Path, required=True, help="folder of a run that was killed and resumed")),
    )
