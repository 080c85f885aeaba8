"""Tests of model paths that resolve to a different folder than at the start of their run."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.models.folder import model_paths
from megarl.models.run_models import ModelFolders
from megarl.run.beginning import resolve
from megarl.run.context import RunContext
from megarl.run.folder import RunFolder
from tests.unit.run.test_resume import PROMPTS, config

LATEST = "runs/latest/model"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(str(folder))
    return folder


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of the run `before`, which runs/latest points to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megarl.run.context.print_run_summary", lambda *_: None)
    monkeypatch.setattr("megarl.run.context.saved_bytes", lambda *_: 0)
    folder = model(tmp_path / "runs" / "before" / "model")
    (tmp_path / "runs" / "latest").symlink_to("before")
    return folder


def recipe(*overrides: str) -> Config:
    return config(Path("runs"), f"model.path={LATEST}", *overrides)


def begin(given: Config) -> tuple[str, Mapping[str, str]]:
    """Start a run as `megarl train` does. Return the path of its model and all model paths."""
    settings = resolve(given)
    folders = ModelFolders(Path(settings.model.path), None, None, None)
    with RunContext.prepare(settings, folders, PROMPTS, model_paths(given)):
        return settings.model.path, model_paths(settings)


def test_same_command_resumes_after_the_link_has_moved(before: Path, capsys) -> None:
    message = f"model.path={Path(LATEST).absolute()}: using {before}, the folder from the start of the run\n"
    assert begin(recipe("resume=auto"))[0] == str(before)
    assert Path("runs/latest").resolve().name == "a"
    assert message not in capsys.readouterr().out
    for _ in range(2):
        assert begin(recipe("resume=auto"))[0] == str(before)
        assert message in capsys.readouterr().out
    # Resume with the command printed at the early end, then with the original command after creating another run.
    assert begin(config(Path("runs"), f"model.path={before}", "resume=auto"))[0] == str(before)
    model(Path("runs/other/model"))
    Path("runs/latest").unlink()
    Path("runs/latest").symlink_to("other")
    assert begin(recipe("resume=auto"))[0] == str(before)


def test_other_runs_resolve_the_current_link(before: Path) -> None:
    begin(recipe())
    after = model(Path("runs/a/model"))
    assert resolve(recipe("run.name=b", "resume=auto")).model.path == str(after.resolve())
    assert resolve(recipe("resume=never")).model.path == str(after.resolve())
    other = config(Path("runs"), "model.path=runs/a/model", "resume=auto")
    assert resolve(other).model.path == str(after.resolve())


def test_missing_earlier_folder_is_not_used(before: Path) -> None:
    begin(recipe())
    before.rename("elsewhere")
    assert resolve(recipe("resume=auto")).model.path == str(Path(LATEST).absolute())


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """A function that sets today's date to a day in November 2026 and returns it as in the config."""

    def set_today(number: int) -> str:
        class Calendar(datetime.date):
            @classmethod
            def today(cls) -> Calendar:
                return cls(2026, 11, number)

        monkeypatch.setattr("megarl.run.beginning.datetime.date", Calendar)
        return f"2026-11-{number:02}"

    return set_today


def test_resumed_run_keeps_its_date(before: Path, day: Callable[[int], str]) -> None:
    """Chat templates may contain the date, and a job may be requeued after midnight."""
    first = day(3)
    begin(recipe("resume=auto"))
    second = day(4)
    assert resolve(recipe("resume=auto")).data.date == first
    begin(recipe("resume=auto"))
    day(5)
    assert resolve(recipe("resume=auto")).data.date == first
    folder = RunFolder.of(recipe())
    folder.config.rename(folder.path / "logs" / "attempt_1" / folder.config.name)  # the next attempt was killed here
    assert resolve(recipe("resume=auto")).data.date == first
    assert resolve(recipe("resume=never")).data.date == day(5)
    assert resolve(recipe("resume=auto", "run.name=b")).data.date == day(5)
    assert resolve(recipe("resume=auto", f"data.date={second}")).data.date == second
