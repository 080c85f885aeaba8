"""Measure the gain of rollouts ahead of training: tokens per second of the same run with rollout.max_staleness=0 and 1,
with one core each for engine and trainer.

.venv/bin/python tools/benchmarks/staleness.py --out tools/benchmarks/results/staleness.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark import QUICKSTART, run_benchmark, train

STEPS, LEFT_OUT = 7, 2
"""Number of steps of a run, and number of excluded first steps, in which queues fill and kernels are compiled."""

RECIPE = (
    f"run.steps={STEPS}",
    "actor.layout={pp: 1, last_stage_layers: null}",
    "actor.threads=1",
    "rollout.threads=1",
    "cluster.placement=disaggregated",
    "batch={prompts_per_step: 4, prompts_per_update: 4, samples_per_prompt: 4}",
    # Some responses become much longer than others, as in reasoning runs.
    "rollout.max_new_tokens=48",
    "rollout.temperature=1.0",
)


def measure_both(_: object) -> dict[str, Any]:
    runs = {str(max_staleness): measure(max_staleness) for max_staleness in (0, 1)}
    return {
        "cpu_percent_elsewhere": max(run.pop("cpu_percent_elsewhere") for run in runs.values()),
        "steps": STEPS - LEFT_OUT,
        "runs": runs,
        "gain": round(runs["1"]["tokens_per_second"] / runs["0"]["tokens_per_second"], 2),
    }


def measure(max_staleness: int) -> dict[str, float]:
    """Train the quickstart's model. Return the means of its metrics, without the first LEFT_OUT steps."""
    with tempfile.TemporaryDirectory() as folder:
        lines, conditions = train(Path(folder), QUICKSTART, *RECIPE, f"rollout.max_staleness={max_staleness}")
    steps = lines[LEFT_OUT:]
    tokens = [step["throughput/tokens_per_second"] * step["time/step"] for step in steps]
    seconds = sum(step["time/step"] for step in steps)
    return {
        "cpu_percent_elsewhere": round(conditions["cpu_percent_elsewhere"], 1),
        "tokens_per_second": round(sum(tokens) / seconds, 1),
        "step_s": round(seconds / len(steps), 2),
        "engines_idle": round(fmean(step["idle/engines"] for step in steps), 3),
        "actor_idle": round(fmean(step["idle/actor"] for step in steps), 3),
        "staleness_max": max(step["weights/staleness_max"] for step in steps),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, measure_both)
