"""Predict steps with `megarl plan`: steps whose times other trainers have published, and steps of the H100 recipes.

.venv/bin/python tools/benchmarks/predictions.py published --out tools/benchmarks/results/published_steps.json
.venv/bin/python tools/benchmarks/predictions.py recipes --out tools/benchmarks/results/recipes.json
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1]))  # for tests.published_models

from megarl.cluster.memory.parameters import Models
from megarl.config.load import load
from megarl.planner.hardware import GIB, read_cluster
from megarl.planner.plan import describe_layout, plan_recipe, simulate_steps
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import TextWorkload
from tests.h100_recipes import RECIPES, H100Recipe
from tests.published_models import CONFIGS
from tools.benchmarks.benchmark import load_config, run_benchmark

FACTOR = 2.5
"""Predictions should be within this factor of the published times."""

MISSES = [("NeMo-RL", "DeepSeek-V3", "256xH100"), ("verl", "DeepSeek-V3", "96xH20")]
"""Runs whose predictions are off by more than FACTOR. Both are of the largest model, whose engines span four nodes."""

PROMPT = 150
"""Assumed prompt tokens in NeMo-RL's runs on OpenMathInstruct-2, which its table does not contain. The mean length in
the table includes prompt and response."""


@dataclass(frozen=True)
class Case:
    """One published run.

    Attributes:
        layout: keys of actor.layout.
        engines: tp of an engine, and the number of engines.
        tokens: mean and maximum number of tokens per sample.
        batch: prompts per step, samples per prompt, prompts per update.
        seconds: published seconds per step.
        rollout: published seconds of its rollout phase, if known.
        prompt: tokens of a prompt.
        settings: other keys of the recipe.
        overlapped: whether rollouts overlap with training (one step off-policy).
    """

    who: str
    source: str
    model: str
    gpus: str
    layout: dict[str, int]
    engines: Sequence[int]
    tokens: Sequence[int]
    batch: Sequence[int]
    settings: dict[str, Any]
    seconds: float
    rollout: float | None = None
    overlapped: bool = False
    prompt: int = PROMPT

    def plan(self) -> StepPlan:
        prompts, samples, update = self.batch
        longest = self.tokens[1]
        settings = {
            "actor.layout.sequence_parallel": "true" if self.layout.get("tp", 1) > 1 else "false",
            **{f"actor.layout.{name}": size for name, size in self.layout.items()},
            "rollout.tp": self.engines[0],
            "rollout.replicas": self.engines[1],
            "batch.prompts_per_step": prompts,
            "batch.samples_per_prompt": samples,
            "batch.prompts_per_update": update,
            "rollout.context_length": longest,
            "rollout.max_new_tokens": longest - self.prompt,
            "actor.tokens_per_microbatch": longest,
            "cluster.placement": "disaggregated" if self.overlapped else "colocated",
            "rollout.sleep": "false" if self.overlapped else "true",
            "actor.recompute": "full",
            "algorithm.kl.coefficient": 0.01,
            **self.settings,
        }
        config = load_config("published", settings)
        workload = TextWorkload.of(config, self.prompt, self.tokens[0] - self.prompt)
        workload = replace(workload, sharing=1)  # these trainers recompute a prompt for each of its samples
        return plan_step(config, Models.of({"actor": CONFIGS[self.model]}), workload, read_cluster(self.gpus))


CASES = [Case(**case) for case in yaml.safe_load((FOLDER / "cases/published_steps.yaml").read_text())]


def predict_published(case: Case) -> dict[str, Any]:
    """Return the case together with its prediction, in seconds."""
    plan = case.plan()
    times = plan.times
    predicted = times.overlapped(is_colocated=False) if case.overlapped else times.seconds
    return {
        **{name: value for name, value in asdict(case).items() if name != "settings"},
        "predicted": round(predicted, 1),
        "phases": {name: round(seconds, 1) for name, seconds in times.phases.items()},
        "bounds": times.bounds,
        "ratio": round(predicted / case.seconds, 2),
    }


def predict_recipe(recipe: H100Recipe) -> dict[str, Any]:
    """Return the prediction for a recipe's step: seconds, memory, tokens of prompts and responses (for image models, of
    trained denoising steps), and the speed-up of simulated steps with rollout.max_staleness=1."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(recipe.file, recipe.overrides(Path(folder)))
        planned = plan_recipe(config, read_cluster(f"{recipe.gpus}xH100-80GB"), as_is=True)
        simulated = None if config.is_offline or config.samples_images else simulate_steps(planned, ahead=(0, 1))
    plan = planned.best
    times, work = plan.times, plan.workload
    return {
        "recipe": recipe.name,
        "model": recipe.model,
        "parameters": recipe.parameters,
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
        "tokens": round(work.num_tokens),
    }


PREDICTIONS = {
    "published": lambda *_: {"runs": [predict_published(case) for case in CASES]},
    "recipes": lambda *_: {"runs": [predict_recipe(recipe) for recipe in RECIPES]},
}


if __name__ == "__main__":
    run_benchmark(__doc__, PREDICTIONS)
