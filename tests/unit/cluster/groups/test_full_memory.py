"""A rank whose node's shared memory is full reports it instead of failing."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.groups import copies
from megarl.core.errors import InfrastructureFailure

Actor = copies.CopyingRank


def copied(error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the result of `copy_state` in a process whose worker raises this error."""

    def copy_state(step: int, folder: Path) -> None:
        assert (step, folder) == (3, tmp_path)
        if error is not None:
            raise error

    monkeypatch.setattr(copies, "own_scratch", lambda: tmp_path / "scratch")
    monkeypatch.setattr(copies, "make_memory_folder", lambda scratch: scratch.parent)
    actor = Actor.__new__(Actor)
    actor._worker = SimpleNamespace(copy_state=copy_state)
    return actor.copy_state(3)


def test_full_memory_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied(None, tmp_path, monkeypatch) == ""
    assert copied(InfrastructureFailure("no room"), tmp_path, monkeypatch) == "no room"
    full = OSError(errno.ENOSPC, "No space left on device", "0.0.new")
    assert "No space left on device" in copied(full, tmp_path, monkeypatch)
    with pytest.raises(PermissionError):
        copied(PermissionError(errno.EACCES, "Permission denied"), tmp_path, monkeypatch)
