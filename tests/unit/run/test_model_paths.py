"""Models whose paths lead elsewhere than when their run began."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.models.folder import model_paths
from megarl.models.run_models import ModelFolders
from megarl.run.beginning import find_model_paths
from megarl.run.context import RunContext
from tests.unit.run.test_resume import PROMPTS, config

LATEST = "runs/latest/model"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(str(folder))
    return folder


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of the run `before`, to which runs/latest leads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megarl.run.context.print_run_summary", lambda *_: None)
    monkeypatch.setattr("megarl.run.context.checkpoint_bytes", lambda *_: 0)
    folder = model(tmp_path / "runs" / "before" / "model")
    (tmp_path / "runs" / "latest").symlink_to("before")
    return folder


def recipe(*overrides: str) -> Config:
    return config(Path("runs"), f"model.path={LATEST}", *overrides)


def begin(given: Config) -> tuple[str, Mapping[str, str]]:
    """Begins a run as `megarl train` does. Return the path of its model, and where others lie."""
    settings = find_model_paths(given)
    folders = ModelFolders(Path(settings.model.path), None, None, None)
    with RunContext.prepare(settings, folders, PROMPTS, model_paths(given)):
        return settings.model.path, model_paths(settings)


def test_the_same_command_goes_on_after_the_link_has_moved_to_the_run(before: Path, capsys) -> None:
    said = f"model.path={LATEST}: the run goes on with {before}, where this led when it began\n"
    assert begin(recipe("resume=auto"))[0] == str(before)
    assert Path("runs/latest").resolve().name == "a"
    assert said not in capsys.readouterr().out
    for _ in range(2):
        assert begin(recipe("resume=auto"))[0] == str(before)
        assert said in capsys.readouterr().out
    # By the command that an early end prints, then as at first; meanwhile another run has been made.
    assert begin(config(Path("runs"), f"model.path={before}", "resume=auto"))[0] == str(before)
    model(Path("runs/other/model"))
    Path("runs/latest").unlink()
    Path("runs/latest").symlink_to("other")
    assert begin(recipe("resume=auto"))[0] == str(before)


def test_a_link_leads_where_it_leads_for_another_run(before: Path) -> None:
    begin(recipe())
    after = model(Path("runs/a/model"))
    assert find_model_paths(recipe("run.name=b", "resume=auto")).model.path == str(after.resolve())
    assert find_model_paths(recipe("resume=never")).model.path == str(after.resolve())
    other = config(Path("runs"), "model.path=runs/a/model", "resume=auto")
    assert find_model_paths(other).model.path == str(after.resolve())


def test_a_folder_that_is_gone_is_not_gone_on_with(before: Path) -> None:
    begin(recipe())
    before.rename("elsewhere")
    assert find_model_paths(recipe("resume=auto")).model.path == LATEST
