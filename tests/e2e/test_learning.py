"""Every estimator and objective learns a task whose optimum is known, and not from the rewards of other samples."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.digits import even_share
from tests.e2e.learning_cases import CASES
from tests.e2e.test_train import REWARD, train
from tests.tiny_model import write_tiny_llama
from tools.benchmarks.machine import machine

pytestmark = [pytest.mark.slow, pytest.mark.learn]
RESULTS = Path(__file__).parents[2] / "tools" / "benchmarks" / "results" / "learning.json"
START, LEARNED, NOT_LEARNED = 0.2, 0.9, 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


@pytest.fixture(scope="module")
def table():
    """Rows by case, written as results once every case has one."""
    rows: dict[str, dict] = {}
    yield rows
    if rows.keys() == CASES.keys():
        result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "runs": rows}
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def shares(run: Path) -> list[float]:
    """The mean share of even digits in the sampled responses of each step, as the rollouts' files have them."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    sampled = [[row for row in step if not row["sample_id"].endswith("greedy")] for step in rows]
    return [fmean(even_share("", row["response"], None) for row in step) for step in sampled]


def two_runs(folder: Path, model: Path, name: str) -> list[list[float]]:
    """At the same time, one a core: with the rewards, and with those of other samples."""
    case = CASES[name]
    common = (f"run.steps={case.steps}", "run.export=false", "actor.threads=1", "rollout.threads=1")

    def run(function: str) -> list[float]:
        (folder / function).mkdir()
        reward = f"rewards.functions=[{{function: '{REWARD}:{function}', weight: 1.0}}]"
        return shares(train(folder / function, model, *common, *case.overrides, reward))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ("even_share", "even_share_of_another")))


@pytest.mark.parametrize("name", CASES)
def test_it_learns(model, tmp_path, table, name):
    learned, control = two_runs(tmp_path, model, name)
    until = next((i for i, share in enumerate(learned, start=1) if share >= LEARNED), None)
    table[name] = {
        "first": learned[0],
        "last": fmean(learned[-3:]),
        "steps": len(learned),
        "steps_to_optimum": until,
        "control_last": fmean(control[-3:]),
    }
    print(name, table[name])
    assert learned[0] <= START
    assert table[name]["last"] >= LEARNED
    assert table[name]["control_last"] < NOT_LEARNED
