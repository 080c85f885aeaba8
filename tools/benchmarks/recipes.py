"""Predict the step of each H100 recipe with `megarl plan`.

.venv/bin/python tools/benchmarks/recipes.py --out tools/benchmarks/results/recipes.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # as a script, and as a module of the tests

from megarl.config.load import load
from megarl.planner.hardware import GIB, read_cluster
from megarl.planner.plan import describe_layout, plan_recipe, simulate_steps
from tests.h100_recipes import RECIPES, H100Recipe
from tests.published_models import PARAMETERS
from tools.benchmarks.benchmark import run_benchmark


def predict(recipe: H100Recipe) -> dict[str, Any]:
    """Return the prediction for a recipe's step: seconds, memory, tokens of prompts and responses, and the speed-up of
    simulated steps with rollout.max_staleness=1."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(recipe.file, recipe.overrides(Path(folder)))
        planned = plan_recipe(config, read_cluster(f"{recipe.gpus}xH100-80GB"), as_is=True)
        simulated = None if config.is_offline else simulate_steps(planned, ahead=(0, 1))
    plan = planned.best
    times, work = plan.times, plan.workload
    return {
        "recipe": recipe.name,
        "model": recipe.model,
        "parameters": PARAMETERS[recipe.model],
        "algorithm": recipe.algorithm,
        "gpus": recipe.gpus,
        "nodes": recipe.nodes,
        "placement": config.cluster.placement,
        "layout": describe_layout(config.actor.layout.model_dump()),
        "engines": None if config.is_offline else [config.rollout.replicas, config.rollout.tp],
        "seconds": round(times.seconds, 1),
        "rollout": None if times.rollout is None else round(times.rollout.seconds, 1),
        "training": round(times.training_seconds, 1),
        "fullest_gib": round(plan.fullest.total / GIB, 1),
        "faster_ahead": simulated and round(simulated[0].step_seconds / simulated[1].step_seconds, 2),
        "tokens": round(work.samples * (work.prompt_tokens + work.response_tokens)),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, lambda _: {"runs": [predict(recipe) for recipe in RECIPES]})
