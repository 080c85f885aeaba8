import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import megarl
from megarl.config.continuation import Change
from megarl.config.schema import Config
from megarl.run.code import git_state
from megarl.run.folder import LAUNCH, RunFolder, changes_in
from tests.killed import killed_after
from tests.paths import CONFIGS


@pytest.fixture
def config(tmp_path) -> Config:
    keys = yaml.load((CONFIGS / "base.yaml").read_text(), yaml.CSafeLoader)
    keys["run"] |= {"folder": str(tmp_path / "runs"), "name": "first", "seed": 7}
    keys["model"]["path"] = "models/tiny"
    keys["data"]["source"] = "arithmetic"
    return Config.model_validate(keys)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_create_makes_folder_and_latest_link(config):
    folder = RunFolder.create(config)
    root = Path(config.run.folder)
    assert folder.path == root / "first"
    assert folder.moved is None
    assert sorted(entry.name for entry in folder.path.iterdir()) == [
        "config.resolved.yaml",
        "logs",
        "manifest.json",
        "rollouts",
    ]
    assert Config.model_validate(yaml.safe_load(folder.config.read_text())) == config
    assert os.readlink(root / "latest") == "first"
    assert sorted(entry.name for entry in root.iterdir()) == ["first", "latest"]


def test_folder_of_a_job_is_reused(config):
    """A folder with only the job's subfolder is free. Steps before the first checkpoint are lost."""
    automatic = config.model_copy(update={"resume": "auto"})
    job = RunFolder.of(config).path / LAUNCH
    job.mkdir(parents=True)
    first = RunFolder.create(automatic)
    first.metrics.write_text('{"step": 1}\n')
    first.rollouts(1).touch()
    second = RunFolder.create(automatic)
    assert (second.path, second.attempt, second.moved) == (first.path, 2, None)
    assert job.is_dir() and second.num_steps == 0 and not second.rollout_files()
    assert first.logs.is_dir()


def test_earlier_runs_of_the_same_name_are_kept(config):
    root = Path(config.run.folder)
    replacing = config.model_copy(update={"run": config.run.model_copy(update={"replace": True})})
    for number, moved in enumerate([None, root / "first.1", root / "first.2"]):
        folder = RunFolder.create(replacing)
        assert folder.moved == moved
        folder.metrics.write_text(str(number))
    assert [(root / name / "metrics.jsonl").read_text() for name in ("first.1", "first.2", "first")] == list("012")
    assert (root / "latest").resolve() == root / "first"


def test_reopen_keeps_data_up_to_the_checkpoint(config):
    folder = RunFolder.create(config)
    (folder.logs / "trainer-0.log").write_text("first")
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "rew')  # killed while writing
    for step in (1, 2, 3, 4):
        folder.rollouts(step).write_text(str(step))
    for name in ("step_000003.jsonl.bak", "step_3.jsonl", "notes"):
        (folder.path / "rollouts" / name).touch()
    (folder.path / "logs" / "attempt_1.old").mkdir()
    folder.model.mkdir()
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 500})})

    again = RunFolder.reopen(longer, step=2)
    assert (again.path, again.attempt, again.moved) == (folder.path, 2, None)
    assert again.metrics.read_text() == "".join(lines[:2])
    assert list(again.rollout_files()) == [1, 2]
    assert again.model.exists()  # kept until the next export
    assert len(list((folder.path / "rollouts").iterdir())) == 2 + 3
    assert yaml.safe_load(again.config.read_text())["run"]["steps"] == 500
    manifest = json.loads(again.manifest.read_text())
    assert (manifest["attempt"], manifest["resumed_after_step"]) == (2, 2)

    assert sorted(file.name for file in folder.logs.iterdir()) == [
        "config.resolved.yaml",
        "manifest.json",
        "trainer-0.log",
    ]
    assert yaml.safe_load((folder.logs / "config.resolved.yaml").read_text())["run"]["steps"] == config.run.steps
    assert RunFolder.reopen(longer, step=2).logs == folder.path / "logs" / "attempt_3"


def test_reopen_removes_images_of_later_steps(config):
    """A killed step may have left images without a JSONL file."""
    folder = RunFolder.create(config)
    for file in (folder.rollouts(2), folder.rollouts(3), folder.evaluation("a", 2), folder.evaluation("a", 3)):
        file.with_suffix("").mkdir(parents=True)
        (file.with_suffix("") / "0.png").touch()
    RunFolder.reopen(config, step=2)
    assert sorted(str(path.relative_to(folder.path)) for path in folder.path.glob("*/**/*.png")) == [
        "evaluations/a/step_000002/0.png",
        "rollouts/step_000002/0.png",
    ]


def test_reopening_survives_a_kill_at_any_operation(config, tmp_path):
    """The config and the manifest are moved to the logs before the new ones are written."""
    rows = [f'{{"step": {step}}}\n' for step in range(1, 5)]
    for limit in range(200):
        own = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path / str(limit))})})
        RunFolder.create(own)
        second = RunFolder.reopen(own, 2, changes=[Change("actor.optimizer.lr", 1.0, 2.0)])
        second.warn(3, "zero_gradient", "text")
        second.metrics.write_text("".join(rows))
        for step in (3, 4):
            second.rollouts(step).touch()
        expected = changes_in(json.loads(second.manifest.read_text())), second.warnings
        assert all(expected)
        was_killed = killed_after(limit, partial(RunFolder.reopen, own, 3))
        again = RunFolder.reopen(own, 3)
        assert (changes_in(json.loads(again.manifest.read_text())), again.warnings) == expected
        assert again.metrics.read_text() == "".join(rows[:3])
        assert again.rollouts(3).exists() and not again.rollouts(4).exists()
        if not was_killed:
            break
    assert not was_killed and limit > 10


def test_folder_with_other_files_raises(config):
    path = Path(config.run.folder) / "first"
    path.mkdir(parents=True)
    assert RunFolder.create(config).path == path  # an empty folder can be used
    for name in ("config.resolved.yaml", "manifest.json"):
        (path / name).unlink()
    with pytest.raises(
        ValueError, match=r"^run.name=first: .*/first already contains other files. Fix: set a different run.name"
    ):
        RunFolder.create(config)


def test_reopened_run_is_not_finished(config):
    folder = RunFolder.create(config)
    assert folder.finished_after is None
    folder.finish(3)
    assert folder.finished_after == 3
    assert json.loads(folder.manifest.read_text())["name"] == "first"
    assert RunFolder.reopen(config, step=3).finished_after is None


def test_run_finishes_if_its_manifest_was_removed(config):
    folder = RunFolder.create(config)
    folder.manifest.unlink()
    folder.warn(2, "zero_gradient", "no gradient")
    folder.manifest.unlink()
    folder.finish(3)
    assert (folder.finished_after, folder.warnings) == (3, [])


def test_manifest_is_written_atomically(config, monkeypatch):
    """A run that is killed during startup leaves no partial manifest."""
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception, match="killed"):
        RunFolder.create(config)
    assert not RunFolder.of(config).manifest.exists()
    assert RunFolder.of(config).finished_after is None


def test_run_reopened_at_step_zero_has_no_metrics(config):
    RunFolder.create(config)
    assert RunFolder.reopen(config, step=0).metrics.read_text() == ""


def test_run_without_logs_can_be_reopened(config):
    """Users delete logs because they are large."""
    folder = RunFolder.create(config)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    for name in ("logs", "rollouts"):
        shutil.rmtree(folder.path / name)
    again = RunFolder.reopen(config, step=1)
    assert again.metrics.read_text() == '{"step": 1}\n'
    assert again.attempt == 2 and again.logs.is_dir() and again.rollouts(2).parent.is_dir()
    assert sorted(file.name for file in folder.logs.iterdir()) == ["config.resolved.yaml", "manifest.json"]


def test_new_model_replaces_the_earlier_one_once_complete(config):
    folder = RunFolder.create(config)
    with folder.new_model() as path:
        path.mkdir()
        (path / "weights").write_text("first")
    with pytest.raises(OSError, match="lost"), folder.new_model() as path:
        path.mkdir()
        raise OSError("lost")
    assert (folder.model / "weights").read_text() == "first"
    (folder.path / ".model" / "new").mkdir(parents=True)  # left by a killed run
    with folder.new_model() as path:
        assert not path.exists() and (folder.model / "weights").read_text() == "first"
        path.mkdir()
        (path / "weights").write_text("second")
    assert (folder.model / "weights").read_text() == "second"
    assert not (folder.path / ".model").exists()


def test_latest_points_to_the_newest_run(config):
    RunFolder.create(config)
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "second"})})
    folder = RunFolder.create(other)
    assert (Path(config.run.folder) / "latest").resolve() == folder.path


def test_name_latest_is_reserved(config):
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "latest"})})
    with pytest.raises(ValueError, match=r"run.name=latest: the name latest is reserved for .* set a different"):
        RunFolder.create(other)
    assert not Path(config.run.folder).exists()


def test_paths_are_absolute(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = config.model_copy(update={"run": config.run.model_copy(update={"folder": "here"})})
    assert RunFolder.create(relative).path == tmp_path / "here" / "first"


def test_manifest_describes_models_data_versions_and_host(config):
    models = {"model.path": {"folder": "/models/tiny", "hash": "def456"}}
    manifest = json.loads(RunFolder.create(config, data_hash="abc123", models=models).manifest.read_text())
    assert manifest["models"] == models
    assert (manifest["name"], manifest["model"]) == ("first", "models/tiny")
    assert (manifest["seed"], manifest["data_hash"]) == (7, "abc123")
    assert datetime.fromisoformat(manifest["started"]).tzinfo is not None
    assert manifest["versions"]["megarl"] == megarl.__version__
    assert manifest["versions"]["python"] == sys.version.split()[0]
    assert manifest["versions"]["torch"] == metadata.version("torch")
    assert manifest["host"]["cores"] == os.cpu_count()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert manifest["host"]["memory_gb"] == pytest.approx(physical / 1e9, rel=0.01)


def test_missing_distribution_has_no_version(config, monkeypatch):
    monkeypatch.setattr("megarl.run.folder.DISTRIBUTIONS", ("no-such-distribution",))
    manifest = json.loads(RunFolder.create(config).manifest.read_text())
    assert manifest["versions"]["no-such-distribution"] is None


def test_git_state_has_commit_and_dirty_flag(tmp_path):
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert git_state(inner) is None  # the enclosing checkout is not megarl's


def test_rollout_files_are_ordered_by_step(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in (1_000_000, 2, 10):
        folder.rollouts(step).touch()
    assert list(folder.rollout_files().items()) == [
        (2, tmp_path / "rollouts" / "step_000002.jsonl"),
        (10, tmp_path / "rollouts" / "step_000010.jsonl"),
        (1_000_000, tmp_path / "rollouts" / "step_1000000.jsonl"),
    ]


def test_evaluation_before_the_first_step_is_repeated(config):
    first = RunFolder.create(config)
    first.metrics.write_text('{"step": 0, "evaluation/a/avg@1": 0.5}\n')
    first.evaluation("a", 0).parent.mkdir(parents=True)
    first.evaluation("a", 0).touch()
    assert first.num_steps == 0 and not first.is_taken
    again = RunFolder.create(config)
    assert (again.path, again.attempt) == (first.path, 2)
    assert again.metrics.read_text() == "" and again.evaluation_files() == {"a": {}}


def test_reopen_keeps_evaluations_up_to_the_checkpoint(config):
    first = RunFolder.create(config)
    lines = [f'{{"step": {step}, "evaluation/a/avg@1": {step / 10}}}\n' for step in range(4)]
    first.metrics.write_text("".join(lines))
    for step in range(4):
        first.evaluation("a", step).parent.mkdir(parents=True, exist_ok=True)
        first.evaluation("a", step).touch()
    again = RunFolder.reopen(config, 2)
    assert again.metrics.read_text() == "".join(lines[:3]) and again.num_steps == 2
    assert list(again.evaluation_files()["a"]) == [0, 1, 2]
    assert again.values_of("evaluation/a/avg@1") == {0: 0.0, 1: 0.1, 2: 0.2}
    assert again.values_of("evaluation/b/avg@1") == {}
