from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.supervision import scratch, segments
from megarl.cluster.supervision.scratch import make_memory_folder, make_scratch, memory_folder, remove_scratch, sweep
from megarl.core.errors import InfrastructureFailure
from tests.timing import HANG_S, wait_until


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "PLACE", tmp_path)


def begin_and_be_killed(place: Path) -> Path:
    """Create a scratch folder and shared memory in a process, and kill the process. Return the memory's path."""
    child = os.fork()
    if not child:
        folder = make_scratch()
        segments.note_earlier(folder)
        name = f"megarl-test-{os.getpid()}"
        file = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_RDWR)
        (folder / f"{segments.NOTE}.1").write_text(f"{os.fstat(file).st_ino} {name}\n")
        (place / "ready").touch()
        time.sleep(HANG_S)
        os._exit(0)
    wait_until((place / "ready").exists)
    (place / "ready").unlink()
    sweep()
    assert list(place.glob("megarl-*")), "it is in use"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Path(f"/dev/shm/megarl-test-{child}")


def test_sweep_removes_only_leftovers_of_dead_runs(tmp_path: Path) -> None:
    segment = begin_and_be_killed(tmp_path)
    assert segment.exists()
    own = make_scratch()
    of_somebody_else = tmp_path / "megarl-notes"
    of_somebody_else.mkdir()
    sweep()
    assert sorted(tmp_path.iterdir()) == sorted([own, of_somebody_else])
    assert not segment.exists()


def test_lock_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process still writes into the folder, its lock file stays, so that a later run can remove the
    folder."""
    folder = make_scratch()
    (folder / "inner").mkdir()
    (folder / "file").touch()
    remove = shutil.rmtree

    def remove_late(path: Path, **options: Any) -> None:
        if path == folder / "inner":
            return
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_late)
        remove_scratch(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["inner", scratch.LOCK]
    remove_scratch(folder)
    assert not folder.exists()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in place of /dev/shm."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(segments, "SHARED_MEMORY", memory)
    return memory


def test_memory_folder_is_removed_with_its_scratch_folder(memory: Path) -> None:
    folder, other = make_scratch(), make_scratch()
    for each in (folder, other):
        memory_folder(each).mkdir(mode=0o700)
        (memory_folder(each) / "actor-0.0.tensors").write_text("state")
    remove_scratch(folder)
    assert list(memory.iterdir()) == [memory_folder(other)]


def test_memory_folder_that_others_may_write_to_is_kept(memory: Path) -> None:
    folder = make_scratch()
    memory_folder(folder).mkdir()
    memory_folder(folder).chmod(0o777)
    remove_scratch(folder)
    assert memory_folder(folder).exists()


def test_folder_with_another_name_has_no_memory_folder(memory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "megarl-notes"
    folder.mkdir()
    memory_folder(folder).mkdir()
    remove_scratch(folder)
    assert memory_folder(folder).exists()


def test_memory_folder_is_private(memory: Path) -> None:
    folder = make_scratch()
    made = make_memory_folder(folder)
    assert made == memory_folder(folder) == make_memory_folder(folder)
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["writable", "link", "another user's"])
def test_memory_folder_of_another_user_is_refused(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = make_scratch()
    if kind == "link":
        memory_folder(folder).symlink_to(tmp_path)
    else:
        memory_folder(folder).mkdir(mode=0o700)
    if kind == "writable":
        memory_folder(folder).chmod(0o777)
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InfrastructureFailure, match="not a private folder of this run"):
        make_memory_folder(folder)
