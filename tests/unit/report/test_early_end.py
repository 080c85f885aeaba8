"""Tests of the messages of a run that ends before its last step."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.report import early_end
from tests.unit.run.test_resume import PROMPTS, config, save, start

ERRORS = [KeyboardInterrupt(), RuntimeError("lost"), ValueError("wrong"), SystemExit(1)]


def command(text: str, prefix: str) -> list[str]:
    """Return the command's arguments in the first line, which must start with `prefix`."""
    line = text.splitlines()[0]
    assert line.startswith(prefix), line
    return shlex.split(line[line.index("megarl train") :])[2:]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_printed_command_resumes_after_the_checkpoint(tmp_path: Path, capsys, error: BaseException) -> None:
    """The command includes the overrides of the original command line."""
    settings = config(tmp_path, "run.seed=5", "run.steps=7")
    run = start(settings, PROMPTS)
    with pytest.raises(type(error)), early_end(run.folder):
        save(run, settings, 2)  # also writes the metrics of step 3, which is not saved
        raise error
    assert run.folder.report.exists()
    recipe, *keys = command(capsys.readouterr().out, "The run ended. Resume it from step_000002 with: ")
    again = start(load(recipe, keys), PROMPTS)
    assert (again.state.step, again.folder.path) == (2, run.folder.path)


def test_printed_command_starts_over_without_a_checkpoint(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(KeyboardInterrupt), early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
        raise KeyboardInterrupt
    assert run.folder.report.exists()
    recipe, *keys = command(
        capsys.readouterr().out, "The run ended after 2 steps without a checkpoint. Start over with: "
    )
    again = start(load(recipe, keys), PROMPTS)
    assert (again.state.step, again.folder.moved) == (0, tmp_path / "a.1")


def test_printed_command_restarts_a_run_without_steps(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(KeyboardInterrupt), early_end(run.folder):
        raise KeyboardInterrupt
    assert not run.folder.report.exists()
    recipe, *keys = command(capsys.readouterr().out, "The run ended before it completed a step. Restart it with: ")
    assert keys == [] and start(load(recipe), PROMPTS).folder.attempt == 2


def test_failing_report_does_not_hide_the_error(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with pytest.raises(RuntimeError, match="lost"), early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n')
        run.folder.report.mkdir()
        raise RuntimeError("lost")
    assert "report: could not be written (" in capsys.readouterr().out


def test_successful_run_prints_nothing(tmp_path: Path, capsys) -> None:
    run = start(config(tmp_path), PROMPTS)
    with early_end(run.folder):
        run.folder.metrics.write_text('{"step": 1}\n')
    assert capsys.readouterr().out == ""
