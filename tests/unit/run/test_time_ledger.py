"""Tests of the time ledger with synthetic records."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.run.attempts import Attempt, Attempts
from megarl.run.folder import LAUNCH
from megarl.run.time_causes import CAUSES, KEPT
from megarl.run.time_ledger import TimeLedger, goodput, make_ledger, read_ledger
from megarl.run.time_records import ENDED, FAILED, FILE, AttemptTimes, Row, Start


def steps(begin: float, first: int, *lengths: float, devices: int = 2, **last: str) -> list[Row]:
    """Return consecutive rows of steps, which only train."""
    rows = []
    for number, length in enumerate(lengths):
        outcome = last if number == len(lengths) - 1 else {}
        rows.append(Row(begin, begin + length, {"train": length * devices}, first + number, **outcome))
        begin += length
    return rows


def start_up(begin: float, end: float, devices: int = 2) -> Row:
    return Row(begin, end, {"startup/models": (end - begin) * devices})


def end_row(begin: float, end: float, cause: str, outcome: str, devices: int = 2) -> Row:
    return Row(begin, end, {cause: (end - begin) * devices}, None, outcome)


def totals(ledger: TimeLedger) -> dict[str, float]:
    return {cause: pytest.approx(value) for cause, value in ledger.seconds.items() if value > 1e-9}


def test_job_with_a_failed_attempt() -> None:
    """Two nodes with one device each, one of them spare. The first attempt is killed in step 4, after a checkpoint of
    step 2. Its driver ends at 60, and the job script notices at 65."""
    launched = [
        (Attempt("7", 0, 10.0, 12.0, 0, submitted=4.0, nodes=2, ended=60.0), 60.0),
        (Attempt("7", 0, 10.0, 70.0, 2, submitted=4.0, nodes=2, noticed=65.0, ended=110.0), 110.0),
    ]
    slurm = {"job": "7", "restart": 0, "allocated": 10.0, "nodes": 1}
    first = [start_up(12, 20, 1), *steps(20, 1, 10, 10, 10, devices=1)]
    second = [start_up(70, 80, 1), *steps(80, 3, 10, 10, devices=1), end_row(100, 108, "finish", ENDED, 1)]
    ledger = make_ledger(
        [AttemptTimes(Start(12, 0, 1, **slurm), first, 58.0), AttemptTimes(Start(70, 2, 1, **slurm), second, 100.0)],
        launched,
        now=111.0,
    )
    assert totals(ledger) == {
        "queue": 6 * 2,
        "startup/job": 2,
        "startup/models": 8,
        "train": 20 + 20,
        "repeated": 10 + 10,
        "detection": 5,
        "restart/relaunch": 5,
        "restart/models": 10,
        "finish": 8 + 2 + 1,
        "spare": 101,
    }
    assert goodput(ledger.seconds) == pytest.approx(40 / 202)
    assert (ledger.num_steps, ledger.num_attempts, ledger.num_allocations) == (4, 2, 1)


def test_requeue_after_the_time_limit_is_a_start() -> None:
    """The job is requeued at 52, two seconds after its last record, and starts again at 90."""
    launched = [
        (Attempt("7", 0, 0.0, 0.0, 0, nodes=1, ended=50.0), 50.0),
        (Attempt("7", 1, 90.0, 92.0, 4, submitted=52.0, nodes=1), 130.0),
    ]
    rows = [start_up(0, 10), *steps(10, 1, 10, 10, 10, 8), end_row(48, 50, "checkpoint", ENDED)]
    again = [start_up(93, 100), *steps(100, 5, 10, 10)]
    attempts = [
        AttemptTimes(Start(0, 0, 2, job="7"), rows),
        AttemptTimes(Start(93, 4, 2, 1, "7", 1, 90.0), again),
    ]
    assert totals(make_ledger(attempts, launched)) == {
        "startup/models": 2 * (10 + 7),
        "train": 2 * (38 + 20),
        "checkpoint": 4,
        "finish": 4,
        "queue": 2 * 38,
        "startup/job": 4,
        "unexplained": 2,  # from the second attempt's record to its driver's start
    }


def test_lost_node_is_detected_until_the_requeue() -> None:
    launched = [
        (Attempt("7", 0, 0.0, 0.0, 0, nodes=1), 40.0),
        (Attempt("7", 1, 200.0, 200.0, 1, submitted=75.0, nodes=1), 200.0),
    ]
    attempts = [
        AttemptTimes(Start(0, 0, 1, job="7"), steps(0, 1, 15, 15, devices=1), 39.0),
        AttemptTimes(Start(200, 1, 1, 1, "7", 1, 200.0), [start_up(200, 210, 1)]),
    ]
    found = totals(make_ledger(attempts, launched))
    assert found == {"train": 15, "repeated": 15 + 10, "detection": 35, "queue": 125, "restart/models": 10}


def test_without_slurm_an_attempt_is_its_allocation() -> None:
    killed = AttemptTimes(Start(100, 0, 2), [start_up(100, 110), *steps(110, 1, 5)], last_seen=118.0)
    failed = AttemptTimes(
        Start(500, 1, 2), [start_up(500, 510), *steps(510, 2, 4), end_row(514, 520, "repeated", FAILED)]
    )
    latest = AttemptTimes(Start(900, 2, 2), [start_up(900, 905), *steps(905, 3, 6)], last_seen=915.0)
    found = make_ledger([killed, failed, latest], [])
    assert totals(found) == {
        "startup/models": 20,
        "train": 2 * (5 + 4 + 6),
        "repeated": 2 * (3 + 6),
        "restart/models": 2 * (10 + 5),
    }
    assert found.is_restart


def test_step_done_again_is_counted_once() -> None:
    """In the same attempt, steps 2 and 3 are repeated after a recovery."""
    rows = steps(0, 1, 10, 10, 10)
    rows += [Row(30, 35, {"checkpoint": 4.0, "train": 6.0}, 4), *steps(35, 2, 7, 8)]
    ledger = make_ledger([AttemptTimes(Start(0, 0, 2), rows)], [])
    assert totals(ledger) == {"train": 2 * (10 + 7 + 8), "repeated": 2 * 20 + 6, "checkpoint": 4}
    assert ledger.num_steps == 3


TIMES = st.floats(0, 1000)
CAUSE = st.sampled_from([*(cause for cause in CAUSES if cause != "queue"), "startup/ray", "restart/in place"])
ROWS = st.builds(
    lambda begin, length, seconds, step, outcome: Row(begin, begin + length, seconds, step, outcome),
    TIMES,
    st.floats(1e-5, 300),
    st.dictionaries(CAUSE, st.floats(0, 2000), max_size=4),
    st.none() | st.integers(1, 9),
    st.sampled_from(["", "", ENDED, FAILED]),
)


@st.composite
def records(draw: st.DrawFn) -> tuple[list[AttemptTimes], list[tuple[Attempt, float]]]:
    """Return any records: overlapping, out of order, or for other allocations than the jobs'."""
    job, restart = st.sampled_from(["", "7", "8"]), st.integers(0, 2)
    starts = st.builds(Start, TIMES, st.integers(0, 9), st.integers(2, 6), st.integers(1, 2), job, restart, TIMES)
    attempts = st.builds(AttemptTimes, starts, st.lists(ROWS, max_size=5), TIMES)
    launched = st.builds(
        Attempt, job, restart, TIMES, TIMES, st.just(0), TIMES, st.integers(0, 3), TIMES, st.just(0.0) | TIMES
    )
    return draw(st.lists(attempts, max_size=4)), draw(st.lists(st.tuples(launched, TIMES), max_size=3))


@given(records(), st.none() | st.floats(0, 2000))
def test_causes_add_up_to_the_allocation(
    found: tuple[list[AttemptTimes], list[tuple[Attempt, float]]], now: float | None
) -> None:
    ledger = make_ledger(*found, now)
    at, by_devices = 0.0, set()
    for interval in ledger.intervals:
        assert interval.begin >= at and interval.end > interval.begin
        at = interval.end
        assert all(value > 0 for value in interval.seconds.values())
        by_devices.add(round(sum(interval.seconds.values()) / (interval.end - interval.begin), 3))
    per_node = max((times.start.devices / times.start.nodes for times in found[0]), default=1.0)
    possible = {round(nodes * per_node, 3) for nodes in range(4)} | {times.start.devices for times in found[0]} | {1}
    assert by_devices <= possible
    assert 0 <= goodput(ledger.seconds) <= 1


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_every_step_is_kept_once(attempts: list[tuple[int, int]]) -> None:
    """Each attempt resumes after a step that was completed, and runs further steps. The last execution of each step is
    kept, as in metrics.jsonl."""
    kept: dict[int, float] = {}
    found: list[AttemptTimes] = []
    begin, reached = 0.0, 0
    for after, count in attempts:
        after = min(after, reached)
        rows = steps(begin, after + 1, *(1.0 + number for number in range(count)), devices=1)
        kept = {step: seconds for step, seconds in kept.items() if step <= after}
        kept |= {row.step: row.end - row.begin for row in rows if row.step is not None}
        found.append(AttemptTimes(Start(begin, after, 1), rows))
        begin, reached = begin + 100, after + count
    ledger = make_ledger(found, [])
    assert ledger.num_steps == len(kept)
    assert ledger.seconds.get("train", 0.0) == pytest.approx(sum(kept.values()))


def write(run: Path, number: int, lines: Sequence[object]) -> Path:
    logs = run / "logs" / f"attempt_{number}"
    logs.mkdir(parents=True)
    (logs / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return logs / FILE


START = {"begin": 100.0, "after_step": 0, "devices": 2, "nodes": 1, "job": "7", "restart": 0, "allocated": 90.0}
RECORDED = [
    START,
    {"begin": 100.0, "end": 110.0, "seconds": {"startup/ray": 20.0}},
    {"begin": 110.0, "end": 120.0, "seconds": {"train": 20.0}, "step": 1},
    {"begin": 120.0, "end": 130.0, "seconds": {"finish": 20.0}, "outcome": ENDED},
]


def launch(run: Path) -> None:
    (run / LAUNCH).mkdir()
    os.utime(Attempts(run).begin(Attempt("7", 0, 90.0, 100.0, saved=0, nodes=1)), (131, 131))


def test_ledger_of_a_run_folder(tmp_path: Path) -> None:
    launch(tmp_path)
    write(tmp_path, 1, RECORDED)
    ledger = read_ledger(tmp_path)
    assert totals(ledger) == {"startup/job": 20, "startup/ray": 20, "train": 20, "finish": 22}
    assert ledger.describe().startswith("goodput: steps whose results were kept took 24.4 % of the allocated time")
    assert "  train           24.4 %  passes and updates\n" in ledger.describe()


@pytest.mark.parametrize(
    ("number", "line", "unexplained"),
    [
        (1, {"begin": 100.0, "end": 110.0, "seconds": {"unknown": 20.0}}, 20),
        (1, {"begin": 100.0, "end": 110.0, "seconds": {"train": -1.0}}, 20),
        (1, {"begin": 100.0, "end": 110.0, "seconds": {"queue": 20.0}}, 20),
        (1, {"begin": 100.0, "end": 110.0, "seconds": {"startup/\u001b[2J": 20.0}}, 20),
        (2, {"begin": 110.0, "end": 120.0, "seconds": {"train": 5.0}, "step": 1}, 15),
        (2, {"begin": 110.0, "end": 110.0, "seconds": {}, "step": 1}, 20),
        (2, {"begin": 110.0, "end": 120.0, "seconds": {"train": 10**9}, "step": 1}, 0),
        (2, "text", 20),
        (0, "text", 0),
    ],
)
def test_damaged_rows_are_unexplained(tmp_path: Path, number: int, line: object, unexplained: float) -> None:
    launch(tmp_path)
    write(tmp_path, 1, [*RECORDED[:number], line, *RECORDED[number + 1 :]])
    seconds = read_ledger(tmp_path).seconds
    assert seconds.get("unexplained", 0.0) == pytest.approx(unexplained)
    assert sum(seconds.values()) == pytest.approx(2 * 41)


def test_damaged_start_loses_no_steps(tmp_path: Path) -> None:
    launch(tmp_path)
    write(tmp_path, 1, RECORDED)
    rows = [{"begin": 200.0, "end": 210.0, "seconds": {"startup/ray": 20.0}}]
    write(tmp_path, 2, ["text", *rows, {"begin": 210.0, "end": 220.0, "seconds": {"train": 20.0}, "step": 2}])
    ledger = read_ledger(tmp_path)
    assert (ledger.num_steps, ledger.seconds["train"]) == (2, 40.0)


def test_deleted_records_are_unexplained(tmp_path: Path) -> None:
    launch(tmp_path)
    file = write(tmp_path, 1, RECORDED)
    file.unlink()
    assert read_ledger(tmp_path).seconds == {"startup/job": 10.0, "unexplained": 31.0}
    for attempt in (tmp_path / LAUNCH / "attempts").iterdir():
        attempt.write_text("{}")
    ledger = read_ledger(tmp_path)
    assert (ledger.seconds, goodput(ledger.seconds)) == ({}, 0.0)
    assert ledger.describe() == "goodput: unknown, because the run has no time records"


def test_prediction_is_beside_the_measurement(tmp_path: Path) -> None:
    launch(tmp_path)
    write(tmp_path, 1, RECORDED)
    file = tmp_path / LAUNCH / "prediction.json"
    file.write_text(json.dumps({"train": 8.25, "refit": 0.5, "unknown": 1.0, "rollout": "x"}))
    lines = read_ledger(tmp_path).describe().splitlines()
    assert "  train           24.4 %         10.00     8.25  passes and updates" in lines
    assert "  refit            0.0 %          0.00     0.50  weight sync" in lines
    file.write_text("[]")
    assert read_ledger(tmp_path).predicted == {}


def test_rounded_rows_are_complete() -> None:
    """Records are rounded to microseconds, which may be a large part of a short row."""
    rows = [Row(0.0, 10.0, {"train": 9.999}), Row(10.0, 10.00002, {"startup/refit": 0.00001}), Row(11.0, 11.00003, {})]
    ledger = make_ledger([AttemptTimes(Start(0, 0, 1), rows)], [])
    assert totals(ledger) == {"train": 10, "startup/refit": 0.00002, "unexplained": 1.00001}


def test_kept_causes_are_declared() -> None:
    assert set(KEPT) < set(CAUSES)


def test_without_progress_returns_a_jobs_trailing_attempts(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).mkdir()
    job_attempts = Attempts(tmp_path)
    for job, saved in (("6", 8), ("7", 0), ("7", 5), ("7", 8), ("7", 8)):
        job_attempts.begin(Attempt(job, 0, 0.0, 1.0, saved))
    assert [len(job_attempts.without_progress(step, "7")) for step in (8, 9, 5)] == [2, 0, 0]
    assert [len(job_attempts.without_progress(8, job)) for job in ("6", "5")] == [1, 0]
