"""Tests of `.ci/run`, which `make test-all` calls, in a repository whose `make` only prints its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

CI, MAKEFILE = ROOT / ".ci" / "run", ROOT / "Makefile"
TABLE = CI.read_text().partition('parts="\n')[2].partition('\n"\n')[0]
PARTS = [line.split()[0] for line in TABLE.splitlines()]
FIRST = ["lint", "test"]
NOT_IN_CI = ["soak"]
BESIDE = [part for part in PARTS if part not in FIRST + NOT_IN_CI]


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
        head = self.git("rev-parse", "HEAD")
        self.commit(".ci/verified", "".join(f"{part} {head}\n" for part in PARTS))

    def run(self, *arguments: str, failing: str = "", touching: str = "") -> subprocess.CompletedProcess[str]:
        """Run `.ci/run` with a make that fails for one target and changes the tree for another one."""
        make = self._bin / "make"
        make.write_text(f'#!/bin/sh\necho "$@"\n[ "$1" != "{touching}" ] || touch new.py\n[ "$1" != "{failing}" ]\n')
        make.chmod(0o755)
        environment = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        return subprocess.run([".ci/run", *arguments], cwd=self.folder, env=environment, capture_output=True, text=True)

    def due(self) -> list[str]:
        """Return the parts that CI runs in parallel with the cluster tests."""
        done = self.run()
        assert done.returncode == 0, done.stderr
        lint, test, *beside = done.stdout.splitlines()
        assert [lint, test] == FIRST
        if not beside:
            return []
        [[jobs, part, *targets]] = map(str.split, beside)
        assert (jobs, part) == ("--jobs=2", "PART=today")
        return targets

    def test_all(self, *parts: str, **faults: str) -> tuple[list[str], dict[str, str]]:
        """Run these parts (default: all) completely. Return the targets that ran and each verified part's commit."""
        done = self.run(*(parts or ("all",)), **faults)
        assert (done.returncode == 0) == (not faults), done.stderr
        targets = [line.split() for line in done.stdout.splitlines()]
        assert all(words[1:] == ["PART="] for words in targets)
        file = self.folder / ".ci" / "verified"
        lines = file.read_text().splitlines() if file.exists() else []
        return [target for target, _ in targets], dict(map(str.split, lines))

    def share(self, target: str, *variables: str) -> list[str]:
        """Return the --part options that `make` passes to pytest."""
        repository = {**os.environ, "GIT_DIR": str(self.folder / ".git")}
        command = ["make", "--dry-run", target, *variables]
        shown = subprocess.run(command, cwd=ROOT, env=repository, capture_output=True, text=True)
        return re.findall(r"--part=\S*", shown.stdout)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_all_parts_are_due_without_a_verified_commit(repository: Repository) -> None:
    assert repository.due() == BESIDE


def test_all_parts_are_due_if_the_verified_commit_is_unknown(repository: Repository) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository.commit(".ci/verified", "".join(f"{part} {commit}\n" for part in PARTS))
    assert repository.due() == BESIDE


def test_no_part_is_due_at_a_verified_commit(repository: Repository) -> None:
    repository.verify()
    assert repository.due() == []


CLUSTER = ["test-cluster"]
RUNS = ["test-learn", "exhaustive-runs"]
RANKS = ["exhaustive-ranks"]
MOST = [*CLUSTER, "types", "test-sandbox", *RUNS, *RANKS]


@pytest.mark.parametrize(
    ("path", "due"),
    [
        ("LICENSE", []),
        ("megarl/planner/plan.py", [*CLUSTER, "types", "test-sandbox", *RANKS, "docs"]),
        ("megarl/report/charts.py", [*CLUSTER, "types", "test-sandbox", "test-browser"]),
        ("megarl/algorithms/kl.py", [*MOST, "docs"]),
        ("docs/index.md", [*RANKS, "docs"]),
        ("megarl/megatron/step.py", MOST),
        ("launch/container/gpu-py312.lock", [*CLUSTER, "resolve-gpu", *RANKS, "docs"]),
        ("tests/tiny_model.py", [*CLUSTER, "test-sandbox", *RUNS, *RANKS, "test-browser"]),
        ("tests/e2e/run.py", [*CLUSTER, *RUNS, *RANKS]),
        ("tests/cluster/jobs.py", CLUSTER),
        ("tests/sandbox/test_users.py", ["test-sandbox"]),
        ("tests/distributed/test_layouts.py", RANKS),
        ("tools/environment/cpu-py311.lock", BESIDE),
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
    [paths] = [line.split()[1:] for line in TABLE.splitlines() if line.startswith("docs ")]
    for page in pages:
        repository.commit(page)
    changed = repository.git("ls-files", "--", *paths).splitlines()
    assert {"README.md", *pages} <= set(changed)


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
    named = re.findall(r"(?:docs|megarl|tests|tools)/[\w/.-]+", TABLE)
    assert len(named) > 8
    assert not [path for path in named if not (ROOT / path).exists()]


def test_parts_are_targets_of_make() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.MULTILINE))
    assert targets >= set(PARTS)


def test_each_part_that_passes_writes_its_line(repository: Repository) -> None:
    commit = repository.git("rev-parse", "HEAD")
    stopped = PARTS.index("soak")
    made, verified = repository.test_all(failing="soak")
    assert (made, verified) == (PARTS[: stopped + 1], dict.fromkeys(PARTS[:stopped], commit))
    made, verified = repository.test_all()
    assert (made, verified) == (PARTS[stopped:], dict.fromkeys(PARTS, commit))
    repository.commit("LICENSE", "later\n")
    assert repository.due() == []
    assert repository.test_all()[0] == FIRST, "these cover all files"


def test_named_parts_run_if_their_paths_have_changed(repository: Repository) -> None:
    first = repository.git("rev-parse", "HEAD")
    assert repository.test_all("types", "docs") == (["types", "docs"], {"types": first, "docs": first})
    second = repository.commit("megarl/planner/plan.py")
    third = repository.commit("LICENSE", "later\n")
    assert second != third
    assert repository.test_all("types") == (["types"], {"types": third, "docs": first})
    assert repository.test_all("types") == ([], {"types": third, "docs": first})
    assert repository.run("type").returncode == 2


def test_only_a_clean_tree_is_verified(repository: Repository) -> None:
    made, verified = repository.test_all("types", touching="types")
    assert (made, verified) == (["types"], {})
    made, verified = repository.test_all("types", touching="types")
    assert (made, verified) == ([], {}), "new.py is not committed"
    commit = repository.commit("new.py")
    assert repository.test_all("types") == (["types"], {"types": commit})
