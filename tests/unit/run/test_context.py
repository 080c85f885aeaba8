"""What every run does with its folder, before its steps and after them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.failure import RunFailure
from megarl.cluster.pending import Pending, ready
from megarl.cluster.trained_models import TrainedModels
from megarl.config.load import load
from megarl.core.types import Prompt
from megarl.data.prompts import PromptSet
from megarl.run.checkpoints import Checkpoints
from megarl.run.context import RunContext
from megarl.run.lock import run_lock
from tests.paths import BASE

PROMPTS = PromptSet((Prompt("0", "", (1,)),), "hash of the prompts")
MODELS = SimpleNamespace(actor=None, trained=lambda config: {}, identify=dict)


@contextmanager
def loop(root: Path, *overrides: str) -> Iterator[RunContext]:
    required = [f"run.folder={root}", "run.name=a", "model.path=m", "data.source=arithmetic", "run.steps=3"]
    with RunContext.prepare(load(BASE, [*required, *overrides]), MODELS, PROMPTS) as prepared:
        yield prepared


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.context.print_run_summary", lambda *_: None)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_folder_of_a_running_one_stays_as_it_is(tmp_path: Path, resume: str) -> None:
    refused = pytest.raises(ValueError, match=r"^run.name=a: .* is in use by process")
    with run_lock(tmp_path / "a"), refused, loop(tmp_path, f"resume={resume}"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]


def test_the_folder_is_this_ones_until_the_end(tmp_path: Path) -> None:
    with loop(tmp_path), pytest.raises(ValueError, match="in use"), run_lock(tmp_path / "a"):
        pass
    with run_lock(tmp_path / "a"):
        pass


def test_checkpoints_that_a_killed_run_did_not_come_to_are_removed_when_the_models_are_loaded(tmp_path: Path) -> None:
    with loop(tmp_path, "checkpoint.keep=1") as first:
        checkpoints = Checkpoints(first.folder.checkpoints)
        for first.state.step in (1, 2, 3):
            checkpoints.begin(first.state.step)
            state = {"config": first.config.model_dump(), "data_hash": PROMPTS.data_hash, "run": first.state.dump()}
            state["models"] = {}
            checkpoints.commit(first.state.step, state, [])
    with loop(tmp_path, "checkpoint.keep=1", "resume=auto") as again:
        assert checkpoints.steps() == [1, 2, 3]
        again.run(TrainedModels({}, {}), step=dict)
        assert checkpoints.steps() == [3]


class Told:
    """Stands in for the driver's interrupts; a step sets is_told, as a signal in it does."""

    is_told, left_s = False, 1.0

    def __init__(self) -> None:
        self.graces: list[tuple[float, bool]] = []

    @contextmanager
    def grace(self, seconds: float, is_awaited: bool) -> Iterator[None]:
        self.graces.append((seconds, is_awaited))
        yield


class Group:
    """Stands in for a TrainerGroup without files, which are written at once."""

    offloads: frozenset[str] = frozenset()

    def save_checkpoint(self, checkpoint: Path) -> Pending[None]:
        return ready(None)

    def checkpoint_written(self) -> Pending[bool]:
        return ready(False)

    def written_files(self, checkpoint: Path) -> list:
        return []

    def finish_checkpoint(self, checkpoint: Path) -> Pending[list]:
        return ready([])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    stand_in = Told()
    monkeypatch.setattr("megarl.run.context.interrupts", stand_in)
    return stand_in


def run_until(ours: RunContext, number: int, act: Callable[[], dict]) -> list[int]:
    """Runs the loop, where step `number` is `act`. Returns the steps whose metrics are written."""

    def step() -> dict:
        return act() if ours.state.step == number else {}

    with pytest.raises(KeyboardInterrupt):
        ours.run(TrainedModels({"actor": Group()}, {"actor": ()}), step)
    return [json.loads(line)["step"] for line in ours.folder.metrics.read_text().splitlines()]


NONE_DUE = ("checkpoint.every_steps=null", "checkpoint.on_signal=true", "checkpoint.grace_s=7")


@pytest.mark.parametrize("every", ["checkpoint.every_steps=null", "checkpoint.every_steps=2"])
@pytest.mark.parametrize("number", [2, 3])
def test_told_to_end_it_saves_after_the_step_under_way(tmp_path: Path, told: Told, every: str, number: int) -> None:
    def act() -> dict:
        told.is_told = True
        return {}

    with pytest.raises(KeyboardInterrupt), loop(tmp_path, *NONE_DUE, every) as ours:
        assert run_until(ours, number, act) == list(range(1, number + 1))
        assert Checkpoints(ours.folder.checkpoints).steps()[-1] == number
        assert told.graces == [(7, True)]
        raise KeyboardInterrupt
    told.is_told = False
    with loop(tmp_path, *NONE_DUE, every, "resume=auto") as again:
        assert again.state.step == number


def test_told_at_the_end_of_its_last_step_it_ends_saved(tmp_path: Path, told: Told, monkeypatch) -> None:
    """It may be minutes until the model is written."""
    with loop(tmp_path, *NONE_DUE) as ours:
        monkeypatch.setattr(type(ours.saver), "commit", lambda _: setattr(told, "is_told", ours.state.step == 3))
        assert run_until(ours, 0, dict) == [1, 2, 3]
        assert Checkpoints(ours.folder.checkpoints).steps() == [3]


def test_a_run_whose_processes_end_by_the_signal_is_interrupted(tmp_path: Path, told: Told, capsys) -> None:
    def act() -> dict:
        told.is_told = True
        raise RunFailure("update: trainer-0 died")

    with loop(tmp_path, *NONE_DUE) as ours:
        assert run_until(ours, 2, act) == [1]
    assert "the step under way did not come to its end: update: trainer-0 died" in capsys.readouterr().out


def test_without_a_signal_a_failure_is_one(tmp_path: Path, told: Told) -> None:
    def fail() -> dict:
        raise RunFailure("update: trainer-0 died")

    with loop(tmp_path) as ours, pytest.raises(RunFailure, match="trainer-0 died"):
        ours.run(TrainedModels({}, {}), fail)


def test_interrupted_in_a_step_it_finishes_what_is_in_host_memory(tmp_path: Path, told: Told) -> None:
    def act() -> dict:
        raise KeyboardInterrupt

    with loop(tmp_path, "checkpoint.every_steps=2", "checkpoint.grace_s=9") as ours:
        assert run_until(ours, 3, act) == [1, 2]
        assert Checkpoints(ours.folder.checkpoints).steps() == [2]
        assert told.graces == [(9, False)]


def test_a_model_of_an_earlier_step_does_not_stay(tmp_path: Path) -> None:
    with loop(tmp_path) as ours:
        ours.folder.model.mkdir()
        (ours.folder.model / "earlier").touch()
        ours.export(Path.mkdir)
        assert not list(ours.folder.model.iterdir())
        assert ours.folder.finished_after == ours.state.step == 0
    with loop(tmp_path, "run.name=b", "run.export=false") as ours:
        ours.folder.model.mkdir()
        ours.export(Path.mkdir)
        assert not ours.folder.model.exists()


def test_it_evaluates_before_the_first_step_and_after_each_with_the_steps_metrics(tmp_path: Path) -> None:
    sets = ("evaluation.sets=[{name: a}]", "evaluation.every_steps=1", "evaluation.best.metric=evaluation/a/avg@1")
    trained = TrainedModels({"actor": Group()}, {"actor": ()})
    with loop(tmp_path, *sets, "checkpoint.every_steps=1", "checkpoint.keep=1") as ours:

        def evaluate() -> dict[str, float]:
            return {"evaluation/a/avg@1": {0: 0.9, 1: 0.4, 2: 0.8, 3: 0.1}[ours.state.step]}

        ours.run(trained, lambda: {"time/step": 1.0}, evaluate)
        rows = [json.loads(line) for line in ours.folder.metrics.read_text().splitlines()]
        assert rows[0] == {"step": 0, "evaluation/a/avg@1": 0.9}
        assert [(row["step"], row["evaluation/a/avg@1"], row["time/step"]) for row in rows[1:]] == [
            (1, 0.4, 1.0),
            (2, 0.8, 1.0),
            (3, 0.1, 1.0),
        ]
        checkpoints = Checkpoints(ours.folder.checkpoints)
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 3], "step_000002")
    with loop(tmp_path, *sets, "checkpoint.every_steps=1", "checkpoint.keep=1", "resume=auto", "run.steps=4") as again:
        again.run(trained, lambda: {"time/step": 1.0}, lambda: {"evaluation/a/avg@1": 0.2})
        rows = [json.loads(line) for line in again.folder.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 4], "step_000002")


def test_solve_rates_of_a_step_change_which_prompts_come(tmp_path: Path) -> None:
    with loop(tmp_path, "data.solved_weight=0.1") as prepared:
        assert [prompt.id for prompt in prepared.take(1)] == ["0"]
        assert prepared.note_solved({"0": 0.75}) == {"data/seen_frac": 1.0, "data/solve_rate_mean": 0.75}
        assert prepared.state.dump()["cursor"]["rates"] == {"0": 0.75}
    with loop(tmp_path, "run.name=b") as prepared:
        assert prepared.note_solved({"0": 0.75}) == {}
