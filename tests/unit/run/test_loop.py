"""What every run does with its folder, before its steps and after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.load import load
from megarl.core.types import Prompt
from megarl.data.prompts import PromptSet
from megarl.run.checkpoints import Checkpoints
from megarl.run.lock import run_lock
from megarl.run.loop import Loop
from tests.paths import BASE

PROMPTS = PromptSet((Prompt("0", "", (1,)),), "hash of the prompts")
MODELS = SimpleNamespace(actor=None, trained=lambda config: {}, identify=dict)


@contextmanager
def loop(root: Path, *overrides: str) -> Iterator[Loop]:
    required = [f"run.folder={root}", "run.name=a", "model.path=m", "data.source=arithmetic", "run.steps=3"]
    with Loop.prepare(load(BASE, [*required, *overrides]), MODELS, PROMPTS) as prepared:
        yield prepared


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.loop.print_run_summary", lambda *_: None)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_folder_of_a_running_one_stays_as_it_is(tmp_path: Path, resume: str) -> None:
    refused = pytest.raises(ValueError, match=r"^run.name=a: .* is in use by process")
    with run_lock(tmp_path / "a"), refused, loop(tmp_path, f"resume={resume}"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]


def test_an_early_end_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), loop(tmp_path):
        raise KeyboardInterrupt
    expected = f"ended before its first step was done; start again: megarl train {tmp_path}/a/config.resolved.yaml\n"
    assert capsys.readouterr().out == expected


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
            checkpoints.commit(first.state.step, state, [])
    with loop(tmp_path, "checkpoint.keep=1", "resume=auto") as again:
        assert checkpoints.steps() == [1, 2, 3]
        again.run([], step=dict)
        assert checkpoints.steps() == [3]


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
