"""Tests of the records of time that a driver writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.placement import Node, Placement, Process
from megarl.cluster.trace import Span, SpanReader, Trace
from megarl.core.timing import process_begin
from megarl.run.attempts import ALLOCATED, Attempt, Attempts
from megarl.run.folder import LAUNCH, RunFolder
from megarl.run.time_ledger import goodput, read_ledger
from megarl.run.time_recorder import TimeRecorder
from megarl.run.time_records import ENDED, FAILED

NODE = Node(0, range(2), 1)
TRAINERS = tuple(Process("trainer", i, 1, NODE, (i,)) for i in range(2))
PLACEMENT = Placement((NODE,), TRAINERS, (), (), (), (Process("engine", 0, 1, NODE, (0, 1)),), ())


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr("megarl.run.time_recorder.time", SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr("megarl.run.time_recorder.IMPORTED", 0.0)
        monkeypatch.delenv("MEGARL_SCRATCH", raising=False)
        monkeypatch.delenv(ALLOCATED, raising=False)

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def begin(run: Path, attempt: int, after_step: int = 0) -> tuple[TimeRecorder, Trace]:
    folder = RunFolder(run, attempt)
    folder.logs.mkdir(parents=True)
    return TimeRecorder(folder, PLACEMENT, after_step), Trace(folder.logs)


def step(clock: Clock, times: TimeRecorder, trace: Trace, number: int) -> dict[str, float]:
    """Record a step of 10 s: 4 s of rollouts, of which the engines sample for 3 s, and 6 s of training."""
    at = clock.now
    clock.advance(10)
    trace.record("rollout", at, at + 4)
    trace.record("train", at + 4, at + 10)
    return times.end_step(number, {"idle/engines": 0.7, "time/step": 10.0})


def test_metrics_equal_the_ledger_after_each_step(tmp_path: Path, clock: Clock) -> None:
    for attempt, after in ((1, 0), (2, 1), (3, 3)):
        times, trace = begin(tmp_path, attempt, after)
        clock.advance(5)
        times.end_start("ray")
        clock.advance(2)
        times.begin_steps()
        for number in range(after + 1, after + 4):
            metrics = step(clock, times, trace, number)
            ledger = read_ledger(tmp_path, now=clock.now)
            total = sum(ledger.seconds.values())
            assert metrics.pop("cluster/goodput") == pytest.approx(goodput(ledger.seconds))
            assert sum(metrics.values()) == pytest.approx(1)
            assert metrics["goodput/train"] == pytest.approx(ledger.seconds["train"] / total)
            assert metrics.get("goodput/repeated", 0) == pytest.approx(ledger.seconds.get("repeated", 0) / total)
            restarted = sum(value for cause, value in ledger.seconds.items() if cause.startswith("restart/"))
            assert metrics.get("goodput/restart", 0) == pytest.approx(restarted / total)
        clock.advance(3)
        if attempt == 1:  # the attempt is killed in its fourth step
            trace.record("rollout", clock.now - 3, clock.now)
        else:
            times.end(after + 4, FAILED if attempt == 2 else ENDED)
        clock.advance(100)
    seconds = {cause: round(value, 3) for cause, value in read_ledger(tmp_path).seconds.items()}
    kept, lost = 1 + 2 + 3, 2 + 1
    assert seconds == {
        "startup/ray": 10,
        "startup/refit": 4,
        "restart/ray": 20,
        "restart/refit": 8,
        "rollout": kept * 3 * 2,
        "long_rollouts": kept * 2,
        "train": kept * 6 * 2,
        "repeated": lost * 20 + 3 * 6,
    }


def test_recovery_in_place_repeats_steps(tmp_path: Path, clock: Clock) -> None:
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    for number in (1, 2, 3):
        step(clock, times, trace, number)
    trace.record("detect", clock.now, clock.advance(1))
    trace.record("recover state", clock.now, clock.advance(4))
    metrics = step(clock, times, trace, 2)
    assert metrics["goodput/repeated"] == pytest.approx(20 / 45)
    assert metrics["goodput/detection"] == pytest.approx(1 / 45)
    assert metrics["goodput/restart"] == pytest.approx(4 / 45)
    assert metrics["cluster/goodput"] == pytest.approx(20 / 45)
    assert read_ledger(tmp_path, clock.now).seconds["repeated"] == pytest.approx(40)


def test_time_after_the_last_step(tmp_path: Path, clock: Clock) -> None:
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    step(clock, times, trace, 1)
    trace.record("save", clock.now, clock.advance(2))
    clock.advance(3)
    times.end(1, ENDED)
    ledger = read_ledger(tmp_path).seconds
    assert (ledger["checkpoint"], ledger["finish"]) == (4, 6)


def test_failed_start_is_part_of_the_start(tmp_path: Path, clock: Clock) -> None:
    times, _ = begin(tmp_path, 1)
    clock.advance(7)
    times.end(0, FAILED)
    assert read_ledger(tmp_path).seconds == {"startup/workers": 14}


def test_allocation_of_a_job_has_spare_nodes(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job waited for 30 s and has 3 nodes of 2 devices, of which the run uses one."""
    variables = {ALLOCATED: "90", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / LAUNCH).mkdir()
    record = Attempt("7", 1, 90.0, 100.0, 0, submitted=60.0, nodes=3)
    os.utime(Attempts(tmp_path).begin(record), (100, 100))
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    metrics = step(clock, times, trace, 1)
    total = 30 * 6 + 20 * 6
    assert metrics["goodput/queue"] == pytest.approx(180 / total)
    assert metrics["goodput/spare"] == pytest.approx(20 * 4 / total)
    assert metrics["cluster/goodput"] == pytest.approx(20 / 120)


def test_a_clock_that_is_set_back_loses_no_later_time(tmp_path: Path, clock: Clock) -> None:
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    clock.advance(-50)
    assert times.end_step(1, {}) == {}
    clock.advance(60)
    trace.record("train", 100, 110)
    assert times.end_step(2, {})["goodput/train"] == pytest.approx(1)


def test_deleted_logs_do_not_end_the_run(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    step(clock, times, trace, 1)
    for file in (logs := RunFolder(tmp_path).logs).iterdir():
        file.unlink()
    logs.rmdir()
    clock.advance(10)
    assert times.end_step(2, {})["goodput/unexplained"] == pytest.approx(1 / 2)
    times.end(2, ENDED)
    assert "without the records of time" in capsys.readouterr().err


def test_rows_are_small(tmp_path: Path, clock: Clock) -> None:
    times, trace = begin(tmp_path, 1)
    times.begin_steps()
    step(clock, times, trace, 1)
    rows = (RunFolder(tmp_path).logs / "time.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["seconds"] == {"rollout": 6.0, "long_rollouts": 2.0, "train": 12.0}
    assert len(rows[-1]) < 300


def test_span_reader_reads_each_span_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.cluster.trace.WINDOW_BYTES", 500)
    trace, reader = Trace(tmp_path), SpanReader(tmp_path)
    assert reader.read() == []
    written = [Span("driver", f"step {i}", float(i), i + 1.0) for i in range(40)]
    found = []
    for i, span in enumerate(written):
        trace.record(span.task, span.begin, span.end)
        if i % 3 == 0:
            found += reader.read()
    assert [*found, *reader.read()] == written


def test_process_begin_is_the_start_of_a_process() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        assert before - 0.05 <= process_begin(process.pid) <= after + 0.05
        process.communicate(b"\n")
