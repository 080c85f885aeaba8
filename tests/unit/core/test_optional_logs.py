"""Logs on a full disk: rows are dropped with one warning, and logging resumes once space is free."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.cluster.groups.evaluation import write_samples
from megarl.cluster.trace import FILE, Trace
from megarl.core.completion import VersionRun
from megarl.core.optional_logs import RESERVED_BYTES, OptionalLog
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.rewards.rollout_file import append_rollouts, write_advantages

Usage = namedtuple("Usage", "total used free")


class Disk:
    """A disk with `free` bytes of free space."""

    def __init__(self) -> None:
        self.free = 2 * RESERVED_BYTES

    def usage(self, _: Path) -> Usage:
        return Usage(2**40, 0, self.free)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    return disk


@contextmanager
def small_files() -> Iterator[None]:
    """Limit files to 64 bytes, so that a write fails within a line. A fixture would also limit the file to which pytest
    writes its output before teardown."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def samples(number: int) -> list[tuple[Sample, Score]]:
    prompt = Prompt("p", "text", [1])
    made = [Sample(f"1.0.{k}", prompt, [2], [-1.0], [True], (VersionRun(0, 1),), "stop", "r") for k in range(number)]
    return [(sample, Score(1.0, {})) for sample in made]


def test_rows_are_dropped_with_one_warning_and_a_count(
    tmp_path: Path, disk: Disk, capfd: pytest.CaptureFixture
) -> None:
    log, file = OptionalLog("rollouts"), tmp_path / "rows.jsonl"
    assert log.append(file, [1], 1)
    disk.free = RESERVED_BYTES - 1
    for _ in range(3):
        assert not log.append(file, iter([2, 3]), 2)
    [warning] = capfd.readouterr().err.splitlines()
    assert warning.startswith(f"megarl: warning: {tmp_path}: cannot be written (less than 256 MiB")
    assert "The run continues without the rollouts. Fix: " in warning
    disk.free = RESERVED_BYTES
    assert log.append(file, [4], 1) and log.append(file, [5], 1)
    [note] = capfd.readouterr().err.splitlines()
    assert note == f"megarl: note: {tmp_path}: writable again; 6 rollouts were dropped"
    assert file.read_text() == "1\n4\n5\n"


def test_failed_write_leaves_no_torn_line(tmp_path: Path) -> None:
    log, file = OptionalLog("rollouts"), tmp_path / "rows.jsonl"
    with small_files():
        written = [log.append(file, [row], 1) for row in ("a" * 20, "b" * 100, "c")]
    assert written == [True, False, True]
    assert [json.loads(line) for line in file.read_text().splitlines()] == ["a" * 20, "c"]


def test_exhausted_quota_is_a_warning(tmp_path: Path, disk: Disk) -> None:
    """The device reports ENOSPC although space is free, as with a quota."""
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    assert not OptionalLog("rollouts").append(tmp_path / "rows.jsonl", ["a"], 1)


def test_rollouts_and_advantages_survive_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    file = tmp_path / "step_000001.jsonl"
    disk.free = 0
    assert not append_rollouts(file, 1, samples(2))
    write_advantages(file, {"1.0.0": 0.5})  # does nothing, because the step has no file
    assert not list(tmp_path.iterdir())
    disk.free = 2 * RESERVED_BYTES
    assert append_rollouts(file, 1, samples(2))
    before = file.read_bytes()
    disk.free = 0
    write_advantages(file, {"1.0.0": 0.5})
    assert file.read_bytes() == before and os.listdir(tmp_path) == [file.name]
    disk.free = 2 * RESERVED_BYTES
    write_advantages(file, {"1.0.0": 0.5})
    assert [json.loads(line)["advantage"] for line in file.read_text().splitlines()] == [0.5, None]


def test_advantages_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, samples(2))
    before = file.read_bytes()
    with small_files():
        write_advantages(file, {"1.0.0": 0.5})
    assert file.read_bytes() == before and os.listdir(tmp_path) == [file.name]


def test_evaluations_and_traces_survive_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    disk.free = 0
    file = tmp_path / "evaluations" / "set" / "step_000001.jsonl"
    write_samples(file, 1, *zip(*samples(2), strict=True), append=append_rollouts)
    trace = Trace(tmp_path)
    trace.record("task", 0.0, 1.0)
    assert not file.exists() and not (tmp_path / FILE).exists()
    disk.free = 2 * RESERVED_BYTES
    write_samples(file, 1, *zip(*samples(2), strict=True), append=append_rollouts)
    trace.record("task", 0.0, 1.0)
    assert len(file.read_text().splitlines()) == 2 and len((tmp_path / FILE).read_text().splitlines()) == 1
