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
    """A run with two allocations of 100 s and 50 s until now, 1,000 s apart: of the first, 40 s went into steps that
    lasted, and 10 s of the second."""
    (tmp_path / LAUNCH).mkdir()
    of_run = Attempts(tmp_path)
    attempts = [(0, 0.0, 10.0, 55.0), (0, 0.0, 60.0, 100.0), (1, 1100.0, 1110.0, 1120.0)]
    for restart, allocated, began, seen in attempts:
        os.utime(of_run.begin(Attempt("7", restart, allocated, began, saved=0)), (seen, seen))
    lines = [{"step": 0, "time/evaluation": 5.0}, {"step": 1, "time/step": 40.0}, {"step": 2, "time/step": 10.0}]
    torn = '{"step": 3, "time/st'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return tmp_path


def test_the_time_of_all_allocations_counts(run: Path) -> None:
    assert allocated_s(run, now=1150.0) == 100 + 50


def test_the_share_is_of_steps_that_lasted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.effective_time.time.time", lambda: 1150.0)
    assert effective_time(run).share == pytest.approx(50 / 150)
    assert str(effective_time(run)) == "33.3 % of 150 s of allocation went into steps that lasted"
    monkeypatch.setenv(ALLOCATED, "1100")
    share = EffectiveShare(run)
    monkeypatch.setattr("megarl.run.effective_time.time.time", lambda: 1170.0)
    assert share.metrics({"time/step": 20.0}) == {"cluster/goodput": pytest.approx(70 / 170)}


def test_a_run_outside_of_a_job_has_no_such_metric(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOCATED, raising=False)
    assert EffectiveShare(run).metrics({"time/step": 1.0}) == {}


def test_attempts_of_a_job_that_saved_nothing_new_are_counted_from_the_latest_on(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).mkdir()
    of_run = Attempts(tmp_path)
    for job, saved in (("6", 8), ("7", 0), ("7", 5), ("7", 8), ("7", 8)):
        of_run.begin(Attempt(job, 0, 0.0, 1.0, saved))
    assert [len(of_run.without_progress(step, "7")) for step in (8, 9, 5)] == [2, 0, 0]
    assert [len(of_run.without_progress(8, job)) for job in ("6", "5")] == [1, 0]
