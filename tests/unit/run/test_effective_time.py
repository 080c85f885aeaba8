from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megarl.run.attempts import Attempt, Attempts
from megarl.run.effective_time import ALLOCATED, EffectiveShare, allocated_s, effective_time
from megarl.run.folder import LAUNCH


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two allocations: 100 s with 40 s of completed steps, and 1,000 s later 50 s with 10 s of them."""
    (tmp_path / LAUNCH).mkdir()
    job_attempts = Attempts(tmp_path)
    attempts = [(0, 0.0, 10.0, 55.0), (0, 0.0, 60.0, 100.0), (1, 1100.0, 1110.0, 1120.0)]
    for restart, allocated, began, seen in attempts:
        os.utime(job_attempts.begin(Attempt("7", restart, allocated, began, saved=0)), (seen, seen))
    lines = [{"step": 0, "time/evaluation": 5.0}, {"step": 1, "time/step": 40.0}, {"step": 2, "time/step": 10.0}]
    partial = '{"step": 3, "time/st'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + partial)
    return tmp_path


def test_allocated_time_covers_all_allocations(run: Path) -> None:
    assert allocated_s(run, now=1150.0) == 100 + 50


def test_goodput_counts_completed_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.effective_time.time.time", lambda: 1150.0)
    assert effective_time(run).share == pytest.approx(50 / 150)
    assert str(effective_time(run)) == "completed steps took 33.3 % of the allocated time (150 s)"
    monkeypatch.setenv(ALLOCATED, "1100")
    share = EffectiveShare(run)
    monkeypatch.setattr("megarl.run.effective_time.time.time", lambda: 1170.0)
    assert share.metrics({"time/step": 20.0}) == {"cluster/goodput": pytest.approx(70 / 170)}


def test_goodput_is_absent_outside_a_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOCATED, raising=False)
    assert EffectiveShare(run).metrics({"time/step": 1.0}) == {}


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text(""), lambda file: file.write_text("{}")])
def test_goodput_is_absent_without_valid_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage) -> None:
    """A user may delete files in the run folder while the run trains."""
    monkeypatch.setenv(ALLOCATED, "1100")
    (tmp_path / LAUNCH).mkdir()
    file, share = Attempts(tmp_path).begin(Attempt("7", 0, 0.0, 1.0, saved=0)), EffectiveShare(tmp_path)
    damage(file)
    assert share.metrics({"time/step": 20.0}) == {}


def test_goodput_is_absent_while_the_clock_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATED, "1100")
    monkeypatch.setattr("megarl.run.effective_time.time.time", lambda: 1000.0)
    (tmp_path / LAUNCH).mkdir()
    Attempts(tmp_path).begin(Attempt("7", 0, 1100.0, 1100.0, saved=0))
    assert EffectiveShare(tmp_path).metrics({"time/step": 20.0}) == {}


def test_without_progress_returns_a_jobs_trailing_attempts(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).mkdir()
    job_attempts = Attempts(tmp_path)
    for job, saved in (("6", 8), ("7", 0), ("7", 5), ("7", 8), ("7", 8)):
        job_attempts.begin(Attempt(job, 0, 0.0, 1.0, saved))
    assert [len(job_attempts.without_progress(step, "7")) for step in (8, 9, 5)] == [2, 0, 0]
    assert [len(job_attempts.without_progress(8, job)) for job in ("6", "5")] == [1, 0]
