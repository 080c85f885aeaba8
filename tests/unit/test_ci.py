"""Tests of `.ci/run` and `make test-all` in a repository whose `make` only prints its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

CI, MAKEFILE = ROOT / ".ci" / "run", ROOT / "Makefile"
FIRST = [["lint"], ["test"]]
ALWAYS = ["test-cluster", "types", "test-sandbox", "resolve-gpu"]
PARTS = ["test-learn", "test-exhaustive", "test-browser", "docs"]


class Repository:
    def __init__(self, folder: Path):
        self.folder, self._bin = folder / "repository", folder / "bin"
        (self.folder / ".ci").mkdir(parents=True)
        self._bin.mkdir()
        shutil.copy(CI, self.folder / ".ci" / "run")
        shutil.copy(MAKEFILE, self.folder)
        self.git("init", "--quiet")
        self.commit("README.md")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        return subprocess.run(
            ["git", *who, *words], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, path: str, text: str = "changed\n") -> str:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", f"--message={path}")
        return self.git("rev-parse", "HEAD")

    def verify(self) -> None:
        self.commit(".ci/verified", self.git("rev-parse", "HEAD") + "\n")

    def ci(self) -> list[list[str]]:
        """Return the arguments of each call of make."""
        make = self._bin / "make"
        make.write_text('#!/bin/sh\necho "$@"\n')
        make.chmod(0o755)
        path = f"{self._bin}:{os.environ['PATH']}"
        done = subprocess.run(
            [".ci/run"], cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    def due(self) -> list[str]:
        *first, [jobs, part, *targets] = self.ci()
        assert first == FIRST
        assert (jobs, part) == ("--jobs=2", "PART=today")
        assert targets[: len(ALWAYS)] == ALWAYS
        return targets[len(ALWAYS) :]

    def share(self, target: str, *variables: str) -> list[str]:
        """Return the share of tests that make passes to pytest."""
        repository = {**os.environ, "GIT_DIR": str(self.folder / ".git")}
        command = ["make", "--dry-run", target, *variables]
        shown = subprocess.run(command, cwd=ROOT, env=repository, capture_output=True, text=True)
        return re.findall(r"--part=\S*", shown.stdout)

    def test_all(self, passes: bool = True) -> str:
        """Run `make test-all` with a recursive make that passes or fails."""
        done = subprocess.run(
            [shutil.which("make"), "test-all", f"MAKE={'true' if passes else 'false'}"],
            cwd=self.folder,
            text=True,
            capture_output=True,
        )
        assert (done.returncode == 0) == passes
        file = self.folder / ".ci" / "verified"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_all_parts_are_due_without_a_verified_commit(repository: Repository) -> None:
    assert repository.due() == PARTS


def test_all_parts_are_due_if_the_verified_commit_is_unknown(repository: Repository) -> None:
    repository.commit(".ci/verified", "0123456789abcdef0123456789abcdef01234567\n")
    assert repository.due() == PARTS


def test_no_part_is_due_at_a_verified_commit(repository: Repository) -> None:
    repository.verify()
    assert repository.due() == []


@pytest.mark.parametrize(
    ("path", "due"),
    [
        ("LICENSE", []),
        ("megarl/planner/plan.py", ["docs"]),
        ("megarl/report/charts.py", ["test-browser"]),
        ("megarl/algorithms/kl.py", ["test-learn", "test-exhaustive", "docs"]),
        ("docs/index.md", ["docs"]),
        ("megarl/megatron/step.py", ["test-learn", "test-exhaustive"]),
        ("tests/e2e/run.py", ["test-learn", "test-exhaustive"]),
        ("tests/distributed/test_layouts.py", ["test-exhaustive"]),
        ("tools/environment/cpu-py311.lock", PARTS),
    ],
)
def test_changed_path_makes_its_parts_due(repository: Repository, path: str, due: list[str]) -> None:
    repository.verify()
    repository.commit(path)
    repository.commit("LICENSE", "changed again\n")
    assert repository.due() == due


def test_each_page_of_the_site_makes_the_docs_due(repository: Repository) -> None:
    pages = re.findall(r": repository/(\S+)", (ROOT / "mkdocs.yml").read_text())
    assert len(pages) > 10
    for page in ("README.md", *pages):
        repository.verify()
        repository.commit(page, f"changed {page}\n")
        assert "docs" in repository.due(), page


@pytest.mark.parametrize("target", ["test-learn", "exhaustive-runs", "exhaustive-ranks"])
def test_each_day_has_its_own_share(repository: Repository, monkeypatch, target: str) -> None:
    for day, share in ((20783, 15), (20784, 0), (20785, 1)):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{day * 86400 + 86399} +0000")
        repository.commit("README.md", f"{day}\n")
        assert repository.share(target, "PART=today") == [f"--part={share}/16"]
    assert repository.share(target, "PART=3/8") == ["--part=3/8"]
    assert repository.share(target) == []


def test_paths_of_the_table_exist() -> None:
    """Otherwise, changes in a renamed folder would not trigger any tests."""
    named = re.findall(r"(?:docs|megarl|tests|tools)/[\w/.-]+", CI.read_text().partition("has_changed")[0])
    assert len(named) > 8
    assert not [path for path in named if not (ROOT / path).exists()]


def test_all_parts_are_in_test_all() -> None:
    targets = re.search(r"\$\(MAKE\) (lint .*) &&", MAKEFILE.read_text()).group(1).split()
    assert {*targets, "test-cluster"} == {"lint", "test", *ALWAYS, *PARTS, "soak"}  # soak includes test-cluster


def test_all_records_the_commit_if_it_passes_on_a_clean_tree(repository: Repository) -> None:
    assert repository.test_all(passes=False) == ""
    (repository.folder / "new.py").touch()
    assert repository.test_all() == ""
    commit = repository.commit("new.py")
    assert repository.test_all() == f"{commit}\n"
    repository.commit("LICENSE", "later\n")
    assert repository.due() == []
