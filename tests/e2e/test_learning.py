"""Every estimator and objective learns a task with a known optimum, and its control with shuffled signals does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean

import pytest

from tests.e2e.learning_cases import CASES, CLOSE, COMPARED, CURVES, Case
from tests.e2e.learning_tasks import DIVERGENCE, sampled_rows
from tests.e2e.series import Series
from tests.e2e.test_train import write_recipe
from tests.tiny_model import write_tiny_model
from tools.benchmarks import figures

pytestmark = [pytest.mark.slow, pytest.mark.learn]
LEARNED, NOT_LEARNED = 0.9, 0.5
COMMON = (
    "rewards.processes=1",
    "run.export=true",
    "checkpoint.every_steps=null",
    "actor.threads=1",
    "rollout.threads=1",
)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict]]:
    """Result rows by case. With --record, they are written to learning.json and the documentation's tables."""
    rows: dict[str, dict] = {}
    yield rows
    if request.config.getoption("--record"):
        figures.record("learning", rows, CASES)


@dataclass(frozen=True)
class Runs:
    """A learning run and its control, each as its folder and a future that resolves when the run ends."""

    learning: tuple[Path, Future[None]]
    control: tuple[Path, Future[None]] | None


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, model) -> Iterator[dict[str, Runs]]:
    """Start the runs of all selected cases in two concurrent series, one per core."""
    queue: SimpleQueue[Series] = SimpleQueue()
    series = [Series(tmp_path_factory.mktemp("series")) for _ in range(2)]
    for idle in series:
        queue.put(idle)

    def train(*arguments: str | Path) -> None:
        idle = queue.get()
        try:
            idle.train(*arguments)
        finally:
            queue.put(idle)

    names = dict.fromkeys(name for test in request.session.items for name in needed(test))
    with ThreadPoolExecutor(2) as pool:

        def start(name: str, shuffled: bool) -> tuple[Path, Future[None]]:
            folder = tmp_path_factory.mktemp("control" if shuffled else "learning")
            return folder, pool.submit(train, *prepared(folder, model, CASES[name], shuffled))

        yield {name: Runs(start(name, False), start(name, True) if CASES[name].has_control else None) for name in names}
        pool.shutdown(wait=True, cancel_futures=True)
    for ended in series:
        ended.end()


def needed(test: pytest.Item) -> tuple[str, ...]:
    """Return the cases whose runs a test reads."""
    match getattr(test, "originalname", ""):
        case "test_it_learns":
            return (test.callspec.params["name"],)
        case "test_distillation_needs_fewer_samples_than_grpo":
            return (test.callspec.params["name"], *COMPARED[test.callspec.params["name"]])
    return ()


def prepared(folder: Path, model: Path, case: Case, shuffled: bool) -> list[str | Path]:
    """Write the run's recipe and data into the folder. Return the run's arguments."""
    if case.family is not None:
        model_type, config_json = case.family
        model = write_tiny_model(folder / "model", model_type, **config_json)
    task_overrides = case.task.overrides(folder, shuffled)
    return [write_recipe(folder, model), f"run.steps={case.steps}", *COMMON, *task_overrides, *case.overrides]


def shares(model: Path, case: Case, run: tuple[Path, Future[None]]) -> list[float]:
    folder, done = run
    done.result()
    return case.task.shares(model, folder / "runs" / "tiny")


def parts(case: Case, run: Runs) -> dict[str, dict[str, float]]:
    """Return the first and the last value of each part, with those of the control if there is one."""
    found: dict[str, dict[str, float]] = {}
    for prefix, side in (("", run.learning), ("control_", run.control)):
        for name, series in (case.task.parts(side[0] / "runs" / "tiny") if side else {}).items():
            found.setdefault(name, {}).update({f"{prefix}first": series[0], f"{prefix}last": last(series, case)})
    return found


def curve(model: Path, case: Case, run: tuple[Path, Future[None]]) -> dict[str, list[float]]:
    """Return the cumulative number of samples, the reward and the parts of each step."""
    reward, folder = shares(model, case, run), run[0] / "runs" / "tiny"
    return {"samples": [*accumulate(map(len, sampled_rows(folder)))], "reward": reward, **case.task.parts(folder)}


def last(shares: list[float], case: Case) -> float:
    return fmean(shares[-3:]) if len(shares) == case.steps else shares[-1]


def test_each_task_has_a_control():
    tasks = {type(case.task) for case in CASES.values()}
    assert {type(case.task) for case in CASES.values() if case.has_control} == tasks


@pytest.mark.parametrize("name", CASES)
def test_it_learns(runs, model, table, name):
    case = CASES[name]
    learned = shares(model, case, runs[name].learning)
    is_per_step = len(learned) == case.steps
    until = next((i for i, share in enumerate(learned, start=1) if share >= LEARNED), None) if is_per_step else None
    row = {
        "first": learned[0],
        "last": last(learned, case),
        "steps": case.steps,
        "steps_to_optimum": until,
        "control_last": last(shares(model, case, runs[name].control), case) if case.has_control else None,
        "parts": parts(case, runs[name]),
        **({"curve": curve(model, case, runs[name].learning)} if name in CURVES else {}),
    }
    print(name, row)
    assert learned[0] <= case.start
    assert row["last"] >= case.learned
    assert not case.has_control or row["control_last"] < NOT_LEARNED
    for part, bounds in case.bounds.items():
        for key, (low, high) in bounds.items():
            assert low <= row["parts"][part][key] <= high, (part, key)
    table[name] = row


@pytest.mark.parametrize("name", COMPARED)
def test_distillation_needs_fewer_samples_than_grpo(runs, model, name):
    """Samples until the divergence from the teacher stays small, and until GRPO's reward first reaches 0.9."""
    curves = {case: curve(model, CASES[case], runs[case].learning) for case in (name, *COMPARED[name])}
    rewarded = {case: figures.samples_to_reach(curves[case], LEARNED) or math.inf for case in COMPARED[name]}
    distilled = figures.samples_to_stay_within(curves[name], DIVERGENCE, CLOSE)
    print(name, distilled, rewarded)
    assert distilled is not None
    assert distilled < min(rewarded.values())
