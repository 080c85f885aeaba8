"""Tests of the run loop: folder, checkpoints, evaluation, signals and export."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.pending import Pending, ready
from megarl.cluster.trained_models import TrainedModels
from megarl.config.load import load
from megarl.core.errors import RunFailure, UserError
from megarl.core.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.report.page import notes, read_contents
from megarl.run import events
from megarl.run.checkpoints import Checkpoints
from megarl.run.context import RunContext
from megarl.run.lock import run_lock
from megarl.run.time_ledger import read_ledger
from tests.paths import BASE

PROMPTS = PromptSet((Prompt("0", "", (1,)),), "hash of the prompts")
MODELS = SimpleNamespace(actor=None, trained=lambda config: {}, identify=dict)


@contextmanager
def prepare(root: Path, *overrides: str) -> Iterator[RunContext]:
    required = [f"run.folder={root}", "run.name=a", "model.path=m", "data.source=arithmetic", "run.steps=3"]
    with RunContext.prepare(load(BASE, [*required, *overrides]), MODELS, PROMPTS) as context:
        yield context


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.context.print_run_summary", lambda *_: None)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_folder_of_a_running_run_is_not_modified(tmp_path: Path, resume: str) -> None:
    refused = pytest.raises(ValueError, match=r"^run.name=a: .* is in use by process")
    with run_lock(tmp_path / "a"), refused, prepare(tmp_path, f"resume={resume}"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]


def test_folder_is_locked_until_the_end(tmp_path: Path) -> None:
    with prepare(tmp_path), pytest.raises(ValueError, match="in use"), run_lock(tmp_path / "a"):
        pass
    with run_lock(tmp_path / "a"):
        pass


def test_excess_checkpoints_are_removed_after_loading(tmp_path: Path) -> None:
    with prepare(tmp_path, "checkpoint.keep=1") as first:
        checkpoints = Checkpoints(first.folder.checkpoints)
        for first.state.step in (1, 2, 3):
            checkpoints.begin(first.state.step)
            state = {"config": first.config.model_dump(), "data_hash": PROMPTS.data_hash, "run": first.state.dump()}
            state["models"] = {}
            checkpoints.commit(first.state.step, state, [])
    with prepare(tmp_path, "checkpoint.keep=1", "resume=auto") as again:
        assert checkpoints.steps() == [1, 2, 3]
        again.run(TrainedModels({}, {}), step=dict)
        assert checkpoints.steps() == [3]


class FakeInterrupts:
    """Replaces the driver's interrupts. A step sets is_signaled to simulate a signal."""

    is_signaled, left_s = False, 1.0

    def __init__(self) -> None:
        self.graces: list[tuple[float, bool]] = []

    @contextmanager
    def grace(self, seconds: float, is_awaited: bool) -> Iterator[None]:
        self.graces.append((seconds, is_awaited))
        yield


class Group:
    """Fakes a TrainerGroup whose checkpoints have no files."""

    offloads: frozenset[str] = frozenset()
    num_launches = 1

    def save_checkpoint(self, checkpoint: Path) -> Pending[None]:
        return ready(None)

    def checkpoint_written(self) -> Pending[bool]:
        return ready(False)

    def written_files(self, checkpoint: Path) -> list:
        return []

    def finish_checkpoint(self, checkpoint: Path) -> Pending[list]:
        return ready([])


@pytest.fixture
def fake_interrupts(monkeypatch: pytest.MonkeyPatch) -> FakeInterrupts:
    fake = FakeInterrupts()
    monkeypatch.setattr("megarl.run.context.interrupts", fake)
    return fake


def run_until(context: RunContext, number: int, act: Callable[[], dict]) -> list[int]:
    """Run the loop with `act` as step `number`. Return the steps whose metrics are written."""

    def step() -> dict:
        return act() if context.state.step == number else {}

    with pytest.raises(KeyboardInterrupt):
        context.run(TrainedModels({"actor": Group()}, {"actor": ()}), step)
    return [json.loads(line)["step"] for line in context.folder.metrics.read_text().splitlines()]


NONE_DUE = ("checkpoint.every_steps=null", "checkpoint.on_signal=true", "checkpoint.grace_s=7")


@pytest.mark.parametrize("every", ["checkpoint.every_steps=null", "checkpoint.every_steps=2"])
@pytest.mark.parametrize("number", [2, 3])
def test_signal_saves_after_the_current_step(
    tmp_path: Path, fake_interrupts: FakeInterrupts, every: str, number: int
) -> None:
    def act() -> dict:
        fake_interrupts.is_signaled = True
        return {}

    with pytest.raises(KeyboardInterrupt), prepare(tmp_path, *NONE_DUE, every) as context:
        assert run_until(context, number, act) == list(range(1, number + 1))
        assert Checkpoints(context.folder.checkpoints).steps()[-1] == number
        assert fake_interrupts.graces == [(7, True)]
        raise KeyboardInterrupt
    fake_interrupts.is_signaled = False
    with prepare(tmp_path, *NONE_DUE, every, "resume=auto") as again:
        assert again.state.step == number


def test_signal_after_the_last_step_ends_the_run_saved(
    tmp_path: Path, fake_interrupts: FakeInterrupts, monkeypatch
) -> None:
    """The model is not exported, which could take minutes."""
    with prepare(tmp_path, *NONE_DUE) as context:
        monkeypatch.setattr(
            type(context.saver), "commit", lambda _: setattr(fake_interrupts, "is_signaled", context.state.step == 3)
        )
        assert run_until(context, 0, dict) == [1, 2, 3]
        assert Checkpoints(context.folder.checkpoints).steps() == [3]


def test_failure_caused_by_a_signal_is_an_interrupt(tmp_path: Path, fake_interrupts: FakeInterrupts, capsys) -> None:
    def act() -> dict:
        fake_interrupts.is_signaled = True
        raise RunFailure("update: trainer-0 died")

    with prepare(tmp_path, *NONE_DUE) as context:
        assert run_until(context, 2, act) == [1]
    assert "the signal interrupted the current step: update: trainer-0 died" in capsys.readouterr().out


def test_failure_without_a_signal_is_raised(tmp_path: Path, fake_interrupts: FakeInterrupts) -> None:
    def fail() -> dict:
        raise RunFailure("update: trainer-0 died")

    with prepare(tmp_path) as context, pytest.raises(RunFailure, match="trainer-0 died"):
        context.run(TrainedModels({}, {}), fail)


@pytest.mark.parametrize("failure", [RunFailure("step: failed"), UserError("rewards.failure_limit=0.1: exceeded")])
def test_failure_finishes_the_checkpoint_in_progress(tmp_path: Path, failure: Exception) -> None:
    def fail() -> dict:
        raise failure

    with prepare(tmp_path, "checkpoint.every_steps=2") as context:
        steps = iter([dict, dict, fail])
        with pytest.raises(type(failure), match=str(failure)):
            context.run(TrainedModels({"actor": Group()}, {"actor": ()}), lambda: next(steps)())
        assert Checkpoints(context.folder.checkpoints).steps() == [2]


@pytest.mark.parametrize("later", [OSError("disk"), KeyboardInterrupt()])
def test_failure_is_not_hidden_by_that_of_the_checkpoint(tmp_path: Path, monkeypatch, capsys, later) -> None:
    def fail() -> dict:
        raise UserError("rewards.failure_limit=0.1: exceeded")

    def commit(*_: object) -> None:
        raise later

    with prepare(tmp_path, "checkpoint.every_steps=2") as context:
        monkeypatch.setattr(Checkpoints, "commit", commit)
        steps = iter([dict, dict, fail])
        with pytest.raises(UserError, match="failure_limit"):
            context.run(TrainedModels({"actor": Group()}, {"actor": ()}), lambda: next(steps)())
    assert f"checkpoint: not completed after the failure: {later!r}" in capsys.readouterr().out


def test_interrupt_finishes_the_checkpoint_in_progress(tmp_path: Path, fake_interrupts: FakeInterrupts) -> None:
    def act() -> dict:
        raise KeyboardInterrupt

    with prepare(tmp_path, "checkpoint.every_steps=2", "checkpoint.grace_s=9") as context:
        assert run_until(context, 3, act) == [1, 2]
        assert Checkpoints(context.folder.checkpoints).steps() == [2]
        assert fake_interrupts.graces == [(9, False)]


def test_export_replaces_or_removes_an_earlier_model(tmp_path: Path) -> None:
    with prepare(tmp_path) as context:
        context.folder.model.mkdir()
        (context.folder.model / "earlier").touch()
        context.export(Path.mkdir)
        assert not list(context.folder.model.iterdir())
        assert context.folder.finished_after == context.state.step == 0
    with prepare(tmp_path, "run.name=b", "run.export=false") as context:
        context.folder.model.mkdir()
        context.export(Path.mkdir)
        assert not context.folder.model.exists()


def test_evaluation_runs_before_the_first_and_after_each_step(tmp_path: Path) -> None:
    sets = ("evaluation.sets=[{name: a}]", "evaluation.every_steps=1", "evaluation.best.metric=evaluation/a/avg@1")
    trained = TrainedModels({"actor": Group()}, {"actor": ()})
    with prepare(tmp_path, *sets, "checkpoint.every_steps=1", "checkpoint.keep=1") as context:

        def evaluate() -> dict[str, float]:
            return {"evaluation/a/avg@1": {0: 0.9, 1: 0.4, 2: 0.8, 3: 0.1}[context.state.step]}

        context.run(trained, lambda: {"time/step": 1.0}, evaluate)
        rows = [json.loads(line) for line in context.folder.metrics.read_text().splitlines()]
        assert rows[0] == {"step": 0, "evaluation/a/avg@1": 0.9}
        assert [(row["step"], row["evaluation/a/avg@1"], row["time/step"]) for row in rows[1:]] == [
            (1, 0.4, 1.0),
            (2, 0.8, 1.0),
            (3, 0.1, 1.0),
        ]
        checkpoints = Checkpoints(context.folder.checkpoints)
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 3], "step_000002")
    with prepare(
        tmp_path, *sets, "checkpoint.every_steps=1", "checkpoint.keep=1", "resume=auto", "run.steps=4"
    ) as again:
        again.run(trained, lambda: {"time/step": 1.0}, lambda: {"evaluation/a/avg@1": 0.2})
        rows = [json.loads(line) for line in again.folder.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 4], "step_000002")


def test_events_are_sent_to_the_process_that_started_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(events.VARIABLE, str(writer))
    sets = ("evaluation.sets=[{name: a}]", "checkpoint.every_steps=2", "run.steps=2")
    with open(reader) as pipe:
        with prepare(tmp_path, *sets) as context:
            assert events.VARIABLE not in os.environ, "other processes of the run must not use the pipe"
            models = TrainedModels({"actor": Group()}, {"actor": ()})
            scores = {0: {"evaluation/a/avg@1": 0.5}}
            context.run(models, lambda: {"reward/mean": math.nan}, lambda: scores.get(context.state.step, {}))
        received = [json.loads(line) for line in pipe]
    path = str(Checkpoints(context.folder.checkpoints).latest())
    assert [(event["event"], event["step"]) for event in received] == [
        *(("evaluation", 0), ("step", 1), ("step", 2), ("checkpoint", 2)),
    ]
    assert received[0]["metrics"] == {"evaluation/a/avg@1": 0.5} and received[3]["path"] == path
    assert all(math.isnan(event["metrics"]["reward/mean"]) for event in received[1:3])


def test_run_continues_without_a_receiver_of_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(events.VARIABLE, str(writer))
    os.close(reader)
    with prepare(tmp_path, "checkpoint.every_steps=null") as context:
        context.run(TrainedModels({"actor": Group()}, {"actor": ()}), lambda: {})
        assert context.state.step == 3


def test_solve_rates_update_the_sampling_weights(tmp_path: Path) -> None:
    with prepare(tmp_path, "data.solved_weight=0.1") as context:
        assert [item.row for item in context.take(1)] == [0]
        assert context.note_solved({"0": 0.75}) == {"data/seen_frac": 1.0, "data/solve_rate_mean": 0.75}
        assert context.state.dump()["cursor"]["rates"] == {"0": 0.75}
    with prepare(tmp_path, "run.name=b") as context:
        assert context.note_solved({"0": 0.75}) == {}


CONSTANT = {"reward/mean": 0.0, "reward/std": 0.0, "policy/grad_norm": 0.0}


def run_constant(context: RunContext) -> None:
    context.run(TrainedModels({"actor": Group()}, {"actor": ()}), lambda: CONSTANT)


def test_health_warnings_are_printed_once_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with prepare(tmp_path, "checkpoint.every_steps=4", "run.steps=4") as context:
        run_constant(context)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megarl: warning: step 3: constant_reward: all rewards of the last 3 steps are 0, and the ")
    [warning] = context.folder.warnings
    assert (warning["step"], warning["name"]) == (3, "constant_reward")
    assert f"Step 3: constant_reward: {warning['message']}." in notes(read_contents(context.folder.path))
    with prepare(tmp_path, "resume=auto", "run.steps=6") as again:
        run_constant(again)
    assert capsys.readouterr().err == "" and again.folder.warnings == [warning]


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_warning_without_a_valid_manifest_is_only_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    def step() -> dict[str, float]:
        if text is None:
            context.folder.manifest.unlink(missing_ok=True)
        else:
            context.folder.manifest.write_text(text)
        return CONSTANT

    with prepare(tmp_path, "checkpoint.every_steps=null", "run.steps=4") as context:
        context.run(TrainedModels({"actor": Group()}, {"actor": ()}), step)
        assert context.state.step == 4
    assert capsys.readouterr().err.startswith("megarl: warning: step 3: constant_reward: ")


@pytest.mark.parametrize(
    ("saving", "saved"),
    [
        (["checkpoint.every_steps=3"], [3]),
        (["checkpoint.every_steps=2"], [2, 3]),
        (["checkpoint.every_steps=null", "checkpoint.on_signal=true"], [3]),
        (["checkpoint.every_steps=null", "checkpoint.on_signal=false"], []),
    ],
)
def test_stop_on_saves_the_step_and_ends_the_run(tmp_path: Path, saving: list[str], saved: list[int]) -> None:
    keys = [*saving, "run.steps=9", "run.stop_on=[entropy_collapse,constant_reward]"]
    stopped = pytest.raises(UserError, match=r"^run.stop_on: constant_reward: all rewards of the last 3 steps are 0")
    with stopped as end, prepare(tmp_path, *keys) as context:
        run_constant(context)
    assert end.value.exit_code == 2
    assert context.state.step == 3 and context.folder.num_steps == 3
    assert Checkpoints(context.folder.checkpoints).steps() == saved


def test_other_warnings_do_not_end_the_run(tmp_path: Path) -> None:
    with prepare(tmp_path, "run.stop_on=[entropy_collapse]", "run.steps=5", "checkpoint.every_steps=null") as context:
        run_constant(context)
    assert context.state.step == 5


def phases_of(context: RunContext) -> Callable[[], dict[str, float]]:
    def step() -> dict[str, float]:
        with context.stopwatch().phase("train"):
            time.sleep(0.01)
        return {}

    return step


def test_run_records_where_its_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("evaluation.sets=[{name: a}]", "evaluation.every_steps=1", "checkpoint.every_steps=1")
    with prepare(tmp_path, *sets) as context:
        begin = time.time()

        def evaluate() -> dict[str, float]:
            time.sleep(0.01)
            return {"evaluation/x": 1.0}

        context.run(TrainedModels({"actor": Group()}, {"actor": ()}), phases_of(context), evaluate)
    ledger = read_ledger(tmp_path / "a")
    causes = {"startup", "train", "driver", "evaluation", "checkpoint", "finish"}
    assert {cause.partition("/")[0] for cause in ledger.seconds} == causes
    assert (ledger.num_steps, ledger.is_restart) == (3, False)
    assert ledger.intervals[-1].end - ledger.intervals[0].begin == pytest.approx(sum(ledger.seconds.values()) / 1)
    assert ledger.intervals[0].begin < begin < ledger.intervals[-1].end <= time.time()
    assert "\ngoodput: steps whose results were kept took " in capsys.readouterr().out
    row = json.loads(context.folder.metrics.read_text().splitlines()[-1])
    assert row["cluster/goodput"] > 0 < row["goodput/evaluation"]


@pytest.mark.parametrize(("error", "is_restart"), [(RunFailure("lost"), True), (KeyboardInterrupt(), False)])
def test_end_of_an_attempt_decides_what_its_next_start_is(
    tmp_path: Path, fake_interrupts: FakeInterrupts, error: BaseException, is_restart: bool
) -> None:
    saves = ("checkpoint.every_steps=1", "checkpoint.background=false")
    with pytest.raises(type(error)), prepare(tmp_path, *saves) as context:
        step = phases_of(context)

        def fail() -> dict[str, float]:
            if context.state.step == 2:
                raise error
            return step()

        context.run(TrainedModels({"actor": Group()}, {"actor": ()}), fail)
    assert read_ledger(tmp_path / "a").seconds["repeated"] > 0
    with prepare(tmp_path, *saves, "resume=auto") as again:
        again.run(TrainedModels({"actor": Group()}, {"actor": ()}), phases_of(again))
    ledger = read_ledger(tmp_path / "a")
    assert (ledger.is_restart, ledger.num_steps) == (is_restart, 3)
    assert any(cause.startswith("restart/") for cause in ledger.seconds) == is_restart
