"""A failed task gives the driver time for its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.launch import task
from megarl.launch.folder import JobFolder


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
