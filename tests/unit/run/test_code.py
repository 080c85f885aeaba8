"""A run folder keeps the user's code, and names what has changed since the run was saved."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megarl.config.continuation import Change
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.run.code import git_state
from megarl.run.folder import RunFolder, changes_since
from tests.paths import QUICKSTART

REWARD = "def score(prompt, response, answer):\n    return 1.0\n"
OWN = """
from dataclasses import replace
from megarl.algorithms.registry import OBJECTIVES
OWN = replace(OBJECTIVES["clip"], name="own")
"""
WORLD = "class World:\n    def step(self, turn):\n        return None\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkout with user code. The working directory is outside."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("megarl.run.folder.MEGARL", tmp_path)  # ignore changes to the checkout during the test
    for name, text in (("reward.py", REWARD), ("own.py", OWN), ("world.py", WORLD)):
        (folder / name).write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def config(project: Path, *overrides: str) -> Config:
    own = [
        f"run.folder={project.parent}/runs",
        f"rewards.functions=[{{function: '{project}/reward.py:score'}}]",
        f"algorithm.objective.name={project}/own.py:OWN",
        f"evaluation.sets=[{{name: a, source: arithmetic, environment: {{class: '{project}/world.py:World'}}}}]",
    ]
    return load(QUICKSTART, [*own, *overrides])


def models(project: Path) -> dict[str, dict[str, str]]:
    return {"model.path": {"folder": str(project.parent / "model"), "hash": "0"}}


def test_run_folder_keeps_copies_and_hashes(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    manifest = json.loads(folder.manifest.read_text())
    assert {record["key"]: Path(record["path"]).name for record in manifest["code"]} == {
        "rewards.functions.function": "reward.py",
        "algorithm.objective.name": "own.py",
        "evaluation.sets.environment.class": "world.py",
        "model.path": "chat_template.jinja",
    }
    for record in manifest["code"]:
        content = Path(record["path"]).read_bytes()
        assert (folder.code / record["copy"]).read_bytes() == content
        assert record["sha256"] == hashlib.sha256(content).hexdigest()
    assert len(list(folder.code.iterdir())) == 4


def test_manifest_names_the_commit_of_the_users_project(project: Path) -> None:
    (project / "reward.py").write_text(f"{REWARD}\n")
    manifest = json.loads(RunFolder.create(config(project)).manifest.read_text())
    commit = git(project, "rev-parse", "HEAD")
    assert manifest["projects"] == [{"folder": str(project), "commit": commit, "dirty": True}]


def test_checkout_of_the_working_directory_is_a_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "inner").mkdir()
    monkeypatch.chdir(project / "inner")
    settings = load(QUICKSTART, [f"run.folder={project.parent}/runs"])
    [state] = json.loads(RunFolder.create(settings).manifest.read_text())["projects"]
    assert (state["folder"], state["dirty"]) == (str(project), False)


def test_unchanged_code_has_no_lines(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    assert changes_since(config(project), models(project), folder.path) == []


def test_moved_code_is_unchanged(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    moved = project.rename(project.parent / "moved")
    assert changes_since(config(moved), models(moved), folder.path) == []


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("project/reward.py", "rewards.functions.function"),
        ("project/own.py", "algorithm.objective.name"),
        ("project/world.py", "evaluation.sets.environment.class"),
        ("model/chat_template.jinja", "model.path"),
    ],
)
def test_changed_code_is_named_with_its_earlier_copy(project: Path, file: str, key: str) -> None:
    before = config(project)
    folder = RunFolder.create(before, "hash", models(project))
    path = project.parent / file
    earlier = path.read_bytes()
    path.write_text(f"{path.read_text()}\n# changed\n")
    line, *others = changes_since(before, models(project), folder.path)
    assert line.startswith(f"{key}: {path.name} has changed (earlier version: {folder.code}/")
    copy = Path(line.rpartition(": ")[2].removesuffix(")"))
    assert copy.read_bytes() == earlier
    assert all(line.startswith("git commit of project: ") for line in others)


def test_replaced_and_removed_functions_are_named(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    (project / "new.py").write_text(REWARD)
    settings = config(project, f"rewards.functions=[{{function: '{project}/new.py:score'}}]")
    assert changes_since(settings, models(project), folder.path) == [
        "rewards.functions.function: new.py has changed (new file)",
        "rewards.functions.function: reward.py is no longer used",
    ]


def test_commits_and_versions_are_named(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    manifest = json.loads(folder.manifest.read_text())
    manifest["versions"]["torch"] = "1.0"
    manifest["git"] = {"commit": "a" * 40, "dirty": False}
    folder.manifest.write_text(json.dumps(manifest))
    lines = changes_since(config(project), models(project), folder.path)
    assert any(line.startswith("version of torch: 1.0 -> ") for line in lines)
    assert any(line.startswith(f"git commit of megarl: {'a' * 12} -> ") for line in lines)


def test_lines_about_a_foreign_manifest_are_printable(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    manifest = json.loads(folder.manifest.read_text())
    escape = "\x1b[2J\n\u202e"
    manifest["code"].append({"key": f"key{escape}", "path": f"/a/file{escape}.py", "sha256": "0", "copy": ""})
    manifest["code"][0] |= {"sha256": "0", "copy": f"copy{escape}"}
    manifest["projects"][0]["commit"] = f"abc{escape}"
    manifest["versions"] |= {f"torch{escape}": f"1{escape}"}
    folder.manifest.write_text(json.dumps(manifest))
    lines = changes_since(config(project), models(project), folder.path)
    assert len(lines) >= 4 and all(line.isprintable() for line in lines)
    assert any(r"file\x1b[2J\n\u202e.py is no longer used" in line for line in lines)


def test_change_of_a_foreign_key_is_printable() -> None:
    line = Change("rewards.a\x1b[2J", "\u202eold", "new").describe()
    assert line.isprintable() and line.startswith(r"rewards.a\x1b[2J changed from ")


def test_slow_status_keeps_the_commit(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a large checkout on a network file system may take minutes."""
    folder = RunFolder.create(config(project))
    real, slow = shutil.which("git"), tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *--porcelain*) exec sleep 60;; *) exec {real} "$@";; esac\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr("megarl.run.code.GIT_S", 1)
    assert git_state(project) == {"commit": git(project, "rev-parse", "HEAD"), "dirty": None}
    assert changes_since(config(project), {}, folder.path) == []


def test_untracked_files_are_not_uncommitted_changes(project: Path) -> None:
    (project / "outputs").touch()
    assert git_state(project) == {"commit": git(project, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("damage", [{}, {"code": 3}, {"code": [{"key": 1}]}, {"projects": "x", "versions": []}])
def test_malformed_manifest_is_not_an_error(project: Path, damage: dict) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    folder.manifest.write_text(json.dumps({"code": [], **damage}))
    assert isinstance(changes_since(config(project), models(project), folder.path), list)


def test_manifest_of_an_earlier_megarl_names_no_code(project: Path) -> None:
    folder = RunFolder.create(config(project), "hash", models(project))
    manifest = json.loads(folder.manifest.read_text())
    del manifest["code"], manifest["projects"]
    folder.manifest.write_text(json.dumps(manifest))
    assert changes_since(config(project), models(project), folder.path) == []


def test_resolved_config_has_absolute_paths(project: Path) -> None:
    folder = RunFolder.create(config(project))
    saved = yaml.safe_load(folder.config.read_text())
    assert saved["rewards"]["functions"][0]["function"] == f"{project}/reward.py:score"
    assert saved["run"]["folder"] == f"{project.parent}/runs"


def test_file_with_credentials_is_not_copied(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "reward.py").write_text(f'{REWARD}\nURL = "http://me:secret@host/judge"\n')
    folder = RunFolder.create(config(project), "hash", models(project))
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "credentials" in line]
    assert warning.startswith(f"megarl: warning: {project}/reward.py: not copied to {folder.code}")
    assert not [path for path in folder.path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    (project / "reward.py").write_text(REWARD)
    line, *_ = changes_since(config(project), models(project), folder.path)
    assert line == "rewards.functions.function: reward.py has changed (no copy of the earlier version)"
