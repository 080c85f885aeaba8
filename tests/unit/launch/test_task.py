"""Tasks of a job: a failed one gives the driver time for its verdict, and the driver records its attempt."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.nodes.rendezvous import NodeRendezvous
from megarl.config.load import dump, load
from megarl.launch import task
from megarl.launch.folder import Job, JobFolder
from megarl.launch.script import TEMPLATE
from megarl.run.attempts import Attempt, Attempts
from tests.paths import BASE


def test_failed_task_exits_once_the_driver_has_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pauses = JobFolder(tmp_path), []
    folder.path.mkdir()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            folder.write_verdict("failed", "a cause")

    monkeypatch.setattr(task.time, "sleep", pause)
    task.await_verdict(folder)
    assert len(pauses) == 3
    task.await_verdict(folder)
    assert len(pauses) == 3


def test_failed_task_does_not_wait_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "VERDICT_S", 0.0)
    task.await_verdict(JobFolder(tmp_path))


@pytest.mark.parametrize(
    ("lost", "verdict", "expected"), [(["n1"], False, 0), (["n1"], True, 1), (["n2"], False, 1), ([], False, 1)]
)
def test_replaced_node_does_not_stop_the_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str], verdict: bool, expected: int
) -> None:
    """`megarl join` fails on n1. srun stops all tasks if this one exits with a status other than 0."""
    folder, nodes = JobFolder(tmp_path), tmp_path / "nodes"
    folder.path.mkdir()
    nodes.mkdir()
    folder.write_job(Job(str(tmp_path), 1, 0, 3))
    NodeRendezvous(nodes).note_lost(lost)
    if verdict:
        folder.write_verdict("failed", "a cause")
    slurm = {"SLURM_PROCID": "1", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    for name, value in (slurm | {"MEGARL_NODES": "n0 n1", "MEGARL_ALLOCATED": "50"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for name in ("_await_folder", "examine_node", "await_reports", "send_report", "load"):
        monkeypatch.setattr(task, name, lambda *_: None)
    monkeypatch.setattr(task, "VERDICT_S", 0.0)
    monkeypatch.setattr(task.signal, "signal", lambda *_: None)
    monkeypatch.setattr(task.subprocess, "Popen", lambda _: SimpleNamespace(poll=lambda: 1))
    assert task.main(tmp_path) == expected


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a task in the second attempt of an allocation with a spare node."""
    slurm = {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    script = {"MEGARL_NODES": "n1", "MEGARL_ALLOCATED": "50", "MEGARL_SUBMITTED": "20", "MEGARL_NOTICED": "90"}
    for name, value in (slurm | script | {"MEGARL_ALLOCATED_NODES": "2"}).items():
        monkeypatch.setenv(name, value)


def drive(run: Path, monkeypatch: pytest.MonkeyPatch, train: Callable[[Path], tuple[int, str]]) -> int:
    """Run an attempt whose nodes have no problems, and `train` instead of `megarl train`."""
    folder = JobFolder(run)
    folder.path.mkdir(parents=True)
    folder.write_job(Job(str(run), 1, 0, 3))
    keys = [f"run.folder={run.parent}", f"run.name={run.name}", "model.path=m", "data.source=arithmetic"]
    folder.recipe.write_text(dump(load(BASE, keys)))
    monkeypatch.chdir(run)
    monkeypatch.setattr(task, "examine_node", lambda *_: None)
    monkeypatch.setattr(task, "listen_for_nodes", lambda report, config: nullcontext(report))
    for name in ("send_report", "await_reports", "find_objection"):
        monkeypatch.setattr(task, name, lambda *_, **__: None)
    monkeypatch.setattr(task, "_train", lambda task, folder, attempt: train(attempt))
    return task.drive(task.Task.of_environment(), folder)


@pytest.mark.usefixtures("variables")
def test_attempt_records_its_allocation_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def train(file: Path) -> tuple[int, str]:
        [(attempt, _)] = Attempts(run).all()
        assert (attempt.began, attempt.ended) == (100.0, 0.0)
        monkeypatch.setattr(task.time, "time", lambda: 130.0)
        return 1, "a cause"

    monkeypatch.setattr(task.time, "time", lambda: 100.0)
    assert drive(run, monkeypatch, train) == 1
    [(attempt, _)] = Attempts(run).all()
    assert attempt == Attempt("7", 0, 50.0, 100.0, 0, submitted=20.0, nodes=2, noticed=90.0, ended=130.0)
    printed = capsys.readouterr().out
    assert "job: goodput: steps whose results were kept took 0.0 % of the allocated time" in printed
    assert "  queue           27.3 %  waiting in Slurm's queue\n" in printed  # 30 s of 110 s


@pytest.mark.usefixtures("variables")
def test_deleted_record_does_not_fail_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(file: Path) -> tuple[int, str]:
        file.unlink()
        file.parent.rmdir()
        return 0, ""

    assert drive(tmp_path / "run", monkeypatch, train) == 0


@pytest.mark.parametrize(
    ("answer", "submitted"),
    [
        ("JobId=7 SubmitTime=1970-01-01T00:01:40 EligibleTime=1970-01-01T00:03:40", "100"),
        ("JobId=7 SubmitTime=Unknown EligibleTime=Unknown", "900"),
        ("", "900"),
    ],
)
def test_job_script_reads_when_the_job_was_submitted(answer: str, submitted: str) -> None:
    lines = [line for line in TEMPLATE.read_text().splitlines() if line.startswith("submitted=")]
    script = "\n".join(['set -uo pipefail; scontrol() { echo "$answer"; }', "id=7; allocated=900", *lines])
    environment = {**os.environ, "answer": answer, "TZ": "UTC"}
    command = ["bash", "-c", f"{script}\necho $submitted"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == f"{submitted}\n"
