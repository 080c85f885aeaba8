"""Checks of the H100 recipes that need no GPU. `test_recipe_parameters.py` builds their models."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.load import load
from megarl.launch import submit
from megarl.launch.folder import JobFolder
from megarl.launch.request import Request
from megarl.planner.hardware import read_cluster
from megarl.planner.plan import plan_recipe
from megarl.planner.refit_preview import preview_refit
from tests.h100_recipes import RECIPES, H100Recipe
from tools.benchmarks.figures import RESULTS
from tools.benchmarks.predictions import predict_recipe

MIN_FREE = 0.05
"""Minimum fraction of a GPU's memory that must be free in a recipe's plan."""


def is_slow_to_plan(recipe: H100Recipe) -> bool:
    slow = ("gpt-oss-120b", "Qwen2.5-32B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B with images")
    return recipe.gpus > 64 or recipe.model in slow


each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@each
def test_recipe_step_fits_with_free_memory(recipe: H100Recipe, tmp_path: Path) -> None:
    config = load(recipe.file, recipe.overrides(tmp_path))
    plan = plan_recipe(config, read_cluster(f"{recipe.gpus}xH100"), as_is=True).best
    assert plan.problem is None
    assert plan.fullest.total <= (1 - MIN_FREE) * plan.cluster.memory_bytes, plan.fullest.arithmetic


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=[pytest.mark.exhaustive] if is_slow_to_plan(recipe) else [])
        for recipe in RECIPES
    ],
)
def test_recipe_job_is_written(recipe: H100Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    request = Request(nodes=recipe.nodes, time="4:00:00", gpus=8)
    keys = [*recipe.overrides(tmp_path), f"run.folder={tmp_path}/runs"]
    lines = list(submit.launch(recipe.file, keys, request, (), dry_run=True))
    assert any("a step takes about" in line for line in lines)
    run = tmp_path / "runs" / load(recipe.file, keys).run.name
    written = load(JobFolder(run).recipe)
    assert (written.cluster.nodes, written.resume) == (recipe.nodes, "auto")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=[pytest.mark.exhaustive] if is_slow_to_plan(recipe) else [])
        for recipe in RECIPES
        if not load(recipe.file).is_offline
    ],
)
def test_recipe_refit_writes_every_element_once(
    recipe: H100Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colocated refits send nothing between nodes. Otherwise every element enters each node with engines once. If an
    engine spans several nodes, every element enters only one of them."""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    config = load(recipe.file, recipe.overrides(tmp_path))
    found = preview_refit(config, 8, "inter=50GB/s,intra=400GB/s")
    assert found.written_once and found.bytes_wasted == 0
    weights = 2 * ModelParameters(recipe.hf_config).count
    rollout = config.rollout
    times = 0 if config.is_colocated else rollout.replicas * rollout.tp // max(8, rollout.tp)
    assert found.bytes_by_link["inter"] == pytest.approx(times * weights, rel=0.01)


@pytest.mark.exhaustive
def test_recorded_predictions_are_current() -> None:
    """`python tools/benchmarks/predictions.py recipes --out …` updates the record."""
    recorded = json.loads((RESULTS / "recipes.json").read_text(encoding="utf-8"))["runs"]
    assert json.loads(json.dumps([predict_recipe(recipe) for recipe in RECIPES])) == recorded
