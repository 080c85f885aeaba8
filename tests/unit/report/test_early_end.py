"""The messages of a run that ends before its last step."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.report.early_end import early_end
from tests.unit.run.test_resume import PROMPTS, config, save, start

ERRORS = [KeyboardInterrupt(), RuntimeError("lost"), ValueError("wrong"), SystemExit(1)]


def command(text: str, saying: str) -> list[str]:
    """The arguments of the command in the first line, which begins with this."""
    line = text.splitlines()[0]
    assert line.startswith(saying), line
    return shlex.split(line[line.index("megarl train") :])[2:]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_run_with_a_checkpoint_goes_on_after_it(tmp_path: Path, capsys, error: BaseException) -> None:
    """The command that it prints does so, whatever was on the command line before."""
    settings = config(tmp_path, "run.seed=5", "run.steps=7")
    run = start(settings, PROMPTS)
    with pytest.raises(type(error)), early_end(run.folder):
        save(run, settings, 2)  # and a step more, which is not saved
        raise error
    assert run.folder.report.exists()
    recipe, *keys = command(capsys.readouterr().out, "ended; step_000002 is saved: go on after it with ")
    again = start(load(recipe, keys), PROMPTS)
    assert (again.state.step, again.folder.path) == (2, run.folder.path)


def test_a_run_with_nothing_saved_starts_anew(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(KeyboardInterrupt), early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
        raise KeyboardInterrupt
    assert run.folder.report.exists()
    recipe, *keys = command(capsys.readouterr().out, "ended with nothing saved of its 2 steps; start anew: ")
    again = start(load(recipe, keys), PROMPTS)
    assert (again.state.step, again.folder.moved) == (0, tmp_path / "a.1")


def test_a_run_without_a_step_starts_again(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(KeyboardInterrupt), early_end(run.folder):
        raise KeyboardInterrupt
    assert not run.folder.report.exists()
    recipe, *keys = command(capsys.readouterr().out, "ended before its first step was done; start again: ")
    assert keys == [] and start(load(recipe), PROMPTS).folder.attempt == 2


def test_a_report_that_fails_does_not_hide_the_error(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(RuntimeError, match="lost"), early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n')
        run.folder.report.mkdir()
        raise RuntimeError("lost")
    assert "report: not written (" in capsys.readouterr().out


def test_a_run_that_ends_says_nothing(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n')
    assert capsys.readouterr().out == ""
