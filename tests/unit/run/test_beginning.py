"""Tests of the checks before models and data are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.weights_hash import weights_hash
from megarl.run.beginning import check_beginning
from tests.paths import BASE, ROOT
from tests.unit.run.test_resume import PROMPTS, config, save, start


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The parent folder of run `a`, which is finished after step 3."""
    settings = config(tmp_path, "run.steps=3")
    run = start(settings, PROMPTS)
    save(run, settings, 3)
    run.folder.finish(3)
    return tmp_path


def test_finished_run_is_reported(finished: Path) -> None:
    assert (
        check_beginning(config(finished, "run.steps=3", "resume=auto"))
        == f"{finished}/a: the run has already finished step 3 of 3. Increase run.steps to continue it"
    )
    assert check_beginning(config(finished, "run.steps=4", "resume=auto")) is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.seed=1", r"^run.seed=1: .*/a was saved with 0. Fix: restore this value"),
        ("run.steps=2", r"^run.steps=2: .*/a was saved after step 3. Fix: set run.steps to at least 3"),
    ],
)
def test_finished_run_of_another_recipe_raises(finished: Path, override: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_beginning(config(finished, "run.steps=3", "resume=auto", override))


def test_finished_run_with_a_moved_model_is_finished(tmp_path: Path) -> None:
    models = {name: tmp_path / name for name in ("there", "here", "other")}
    for name, folder in models.items():
        folder.mkdir()
        (folder / "model.safetensors").write_text("other" if name == "other" else "same")
    runs = tmp_path / "runs"
    paths = {name: f"model.path={folder}" for name, folder in models.items()}
    settings = config(runs, paths["there"])
    identity = {"folder": str(models["there"]), "hash": weights_hash(models["there"])}
    run = start(settings, PROMPTS, {"model.path": identity})
    run.folder.finish(settings.run.steps)
    assert "already finished step" in check_beginning(config(runs, "resume=auto", paths["here"]))
    with pytest.raises(UserError, match=r"^model.path=.*/other: .* was saved with .*/there. Fix: restore this"):
        check_beginning(config(runs, "resume=auto", paths["other"]))


def test_taken_name_raises_unless_the_run_is_resumed(tmp_path: Path) -> None:
    assert check_beginning(config(tmp_path)) is None
    save(start(config(tmp_path), PROMPTS), config(tmp_path), 2)
    assert check_beginning(config(tmp_path, "resume=auto")) is None
    assert check_beginning(config(tmp_path, "run.replace=true")) is None
    newest = tmp_path / "latest" / "checkpoints" / "step_000002"
    assert check_beginning(config(tmp_path, f"resume={newest}")) is None
    for resume in ("never", tmp_path / "b" / "checkpoints" / "step_000002"):
        with pytest.raises(
            UserError, match=r"^run.name=a: .* resume=auto .* a different run.name, or set run.replace=true"
        ):
            check_beginning(config(tmp_path, f"resume={resume}"))


def test_command_reports_it_without_heavy_imports(finished: Path) -> None:
    code = """if True:
        import sys
        from megarl.cli import main
        try:
            main()
        finally:
            print(sorted({"torch", "ray", "vllm", "transformers"} & set(sys.modules)))
    """
    keys = [f"run.folder={finished}", "run.name=a", "model.path=m", "data.source=arithmetic", "run.steps=3"]
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for resume, expected in (
        (
            "auto",
            (0, f"{finished}/a: the run has already finished step 3 of 3. Increase run.steps to continue it\n[]\n"),
        ),
        ("never", (2, "[]\n")),
    ):
        command = [sys.executable, "-c", code, "train", str(BASE), *keys, f"resume={resume}"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == expected
    assert done.stderr.startswith(
        f"megarl: error: run.name=a: {finished}/a already contains 4 steps of an earlier run. Fix: set resume=auto"
    )
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
