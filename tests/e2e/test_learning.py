"""Every estimator and objective learns a task whose optimum is known, and not from what belongs to other samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.learning_cases import CASES, Case
from tests.e2e.series import Series
from tests.e2e.test_train import write_recipe
from tests.tiny_model import write_tiny_llama
from tools.benchmarks import figures
from tools.benchmarks.machine import machine

pytestmark = [pytest.mark.slow, pytest.mark.learn]
START, LEARNED, NOT_LEARNED = 0.2, 0.9, 0.5
ALIKE = ("run.export=true", "checkpoint.every_steps=null", "actor.threads=1", "rollout.threads=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


@pytest.fixture(scope="module")
def table():
    """Rows by case, written as results, and into the README, once every case has one."""
    rows: dict[str, dict] = {}
    yield rows
    if rows.keys() == CASES.keys():
        result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "runs": rows}
        (figures.RESULTS / "learning.json").write_text(json.dumps(result, indent=2) + "\n")
        figures.write()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[tuple[Series, Series]]:
    """For the runs that are to learn, and for their controls."""
    series = Series(tmp_path_factory.mktemp("learning")), Series(tmp_path_factory.mktemp("control"))
    yield series
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Series.end, series))


def prepared(folder: Path, model: Path, case: Case, shuffled: bool) -> list[str | Path]:
    """The arguments of the run, in this folder."""
    folder.mkdir()
    of_task = case.task.overrides(folder, shuffled)
    return [write_recipe(folder, model), f"run.steps={case.steps}", *ALIKE, *of_task, *case.overrides]


def parameter(name: str):
    return pytest.param(name, marks=[pytest.mark.representative] if CASES[name].in_test else [])


@pytest.mark.parametrize("name", [parameter(name) for name in CASES])
def test_it_learns(two, model, tmp_path, table, name):
    """Both at the same time, one a core."""
    case = CASES[name]
    folders = [tmp_path / "learning", tmp_path / "control"]
    asked = [prepared(folder, model, case, shuffled=folder.name == "control") for folder in folders]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(series.train, *arguments) for series, arguments in zip(two, asked, strict=True)]
    for run in runs:
        run.result()
    # One after the other: transformers cannot load two models in two threads, and leaves their memory as it finds it.
    learned, control = (case.task.shares(model, folder / "runs" / "tiny") for folder in folders)
    of_steps = len(learned) == case.steps
    until = next((i for i, share in enumerate(learned, start=1) if share >= LEARNED), None) if of_steps else None
    table[name] = {
        "first": learned[0],
        "last": fmean(learned[-3:]) if of_steps else learned[-1],
        "steps": case.steps,
        "steps_to_optimum": until,
        "control_last": fmean(control[-3:]) if of_steps else control[-1],
    }
    print(name, table[name])
    assert learned[0] <= START
    assert table[name]["last"] >= LEARNED
    assert table[name]["control_last"] < NOT_LEARNED
