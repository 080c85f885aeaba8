"""The step of each recipe for H100s, as `megarl plan` predicts it.

.venv/bin/python tools/benchmarks/recipes.py --out tools/benchmarks/results/recipes.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the shapes of published models are those that the tests have

from megarl.config.load import load  # noqa: E402
from megarl.planner.hardware import GIB, read_cluster  # noqa: E402
from megarl.planner.plan import describe_layout, plan_recipe, simulate_steps  # noqa: E402
from tests.h100_recipes import RECIPES, H100Recipe  # noqa: E402
from tests.published_models import PARAMETERS  # noqa: E402


def predict(recipe: H100Recipe) -> dict[str, Any]:
    """Returns what is predicted of a recipe's step: seconds, memory, tokens of prompts and responses, and how
    much faster simulated steps are with rollout.max_staleness=1."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(recipe.file, recipe.overrides(Path(folder)))
        planned = plan_recipe(config, read_cluster(f"{recipe.gpus}xH100-80GB"), as_it_is=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    found = json.dumps({"runs": [predict(recipe) for recipe in RECIPES]}, indent=2) + "\n"
    if arguments.out is None:
        print(found, end="")
    else:
        arguments.out.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
