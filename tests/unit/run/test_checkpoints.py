"""Tests of checkpoints on disk: the latest one is complete after any crash, and damage is reported."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.checkpoint import Checkpoint, FileRecord, _digest, is_checkpoint, noted_files, seal, write_note
from megarl.core.errors import DamagedCheckpoint, UserError
from megarl.run.checkpoints import Checkpoints
from tests.killed import killed_after

STATE = {"run": {"step": 1}, "config": {"lr": 1e-6, "name": "é"}}


def write(checkpoints: Checkpoints, step: int) -> list[FileRecord]:
    folder = checkpoints.begin(step)
    (folder / "actor").mkdir()
    files = [folder / "actor" / name for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")]
    for file in files:
        file.write_bytes(f"{step} {file.name}".encode() * 100)
    return [seal(file, folder) for file in files]


def save(checkpoints: Checkpoints, *steps: int) -> Checkpoint:
    for step in steps:
        checkpoint = checkpoints.commit(step, STATE, write(checkpoints, step))
    return checkpoint


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.path.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints")


def test_opened_checkpoint_equals_the_saved_one(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    saved = save(checkpoints, 20)
    assert checkpoints.latest() == saved.path == checkpoints.path / "step_000020"
    opened = Checkpoint.open(saved.path)
    assert opened == saved
    assert (opened.step, opened.state) == (20, STATE)
    assert {record.path for record in opened.files} == {
        "actor/__0_0.distcp",
        "actor/__1_0.distcp",
        "actor/.metadata",
    }
    assert opened.num_bytes == sum(file.stat().st_size for file in (saved.path / "actor").iterdir())
    opened.verify(opened.files)
    assert names(checkpoints) == ["latest", "step_000020"]


def test_checksums_are_sha256(checkpoints: Checkpoints) -> None:
    folder = checkpoints.begin(1)
    (folder / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert seal(folder / "file", folder) == FileRecord("file", 3, expected)


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name", "problem"),
    [
        (remove, "actor/__1_0.distcp", "actor/__1_0.distcp is missing"),
        (truncate, "actor/__0_0.distcp", "actor/__0_0.distcp is corrupt: it has 1,499 bytes, expected 1,500"),
        (flip, "actor/.metadata", "actor/.metadata is corrupt: its SHA-256 is"),
        (remove, "manifest.json", "manifest.json is missing"),
        (truncate, "manifest.json", "manifest.json is corrupt"),
        (flip, "manifest.json", "manifest.json is corrupt"),
    ],
)
def test_damage_is_reported_with_the_previous_checkpoint(checkpoints, damage, name, problem) -> None:
    latest = save(checkpoints, 10, 20, 30).path
    damage(latest / name)
    if problem.startswith("manifest.json is corrupt") and damage is truncate:
        damage(latest / name)  # truncate twice, because the first lost byte is the trailing newline
    remedy = f"Fix: resume from the previous checkpoint with resume={checkpoints.path}/step_000020"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{latest}: {problem}')}.*[.] {re.escape(remedy)}$"):
        opened = Checkpoint.open(latest)
        opened.verify(opened.files)
    previous = Checkpoint.open(checkpoints.path / "step_000020")
    previous.verify(previous.files)


def test_changed_state_is_detected(checkpoints: Checkpoints) -> None:
    manifest = save(checkpoints, 1).path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["content"]["state"]["run"]["step"] = 2
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest.json is corrupt\. No earlier checkpoint exists\. Fix: start"):
        Checkpoint.open(manifest.parent)


def test_keep_retains_the_newest(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 10, 15, 20)
    assert len(checkpoints) == 4
    checkpoints.keep(2)
    assert names(checkpoints) == ["latest", "step_000015", "step_000020"]
    checkpoints.keep(2)
    checkpoints.keep(1)
    assert names(checkpoints) == ["latest", "step_000020"]


def test_keep_retains_the_latest_pointer(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 10, 15)
    checkpoints.point_to(checkpoints.path / "step_000005")
    checkpoints.keep(1)
    assert (checkpoints.path / "step_000005").exists()


def test_go_back_to_removes_later_checkpoints(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 10, 15)
    checkpoints.roll_back_to(10)
    assert names(checkpoints) == ["latest", "step_000005", "step_000010"]
    assert checkpoints.latest() == checkpoints.path / "step_000010"


def test_folders_with_other_names_are_ignored(checkpoints: Checkpoints) -> None:
    earlier = save(checkpoints, 20, 30).path.with_name("step_000020")
    shutil.copytree(earlier, earlier.with_name("step_000020.keep"))
    (checkpoints.path / "step_25").mkdir()
    latest = save(checkpoints, 40)
    checkpoints.keep(1)
    assert names(checkpoints) == ["latest", "step_000020.keep", "step_000040", "step_25"]
    remove(latest.path / "manifest.json")
    with pytest.raises(ValueError, match="No earlier checkpoint exists"):
        Checkpoint.open(latest.path)
    kept = earlier.with_name("step_000020.keep")
    assert Checkpoint.open(kept).step == 20
    flip(kept / "actor" / ".metadata")
    with pytest.raises(ValueError, match=r"step_000020.keep: actor/.metadata is corrupt: .*[.] No earlier"):
        Checkpoint.open(kept).verify(Checkpoint.open(kept).files)


def test_latest_is_complete_after_a_kill_at_any_operation(tmp_path: Path) -> None:
    original = Checkpoints(tmp_path / "original")
    save(original, 10, 20)
    for limit in range(200):
        checkpoints = Checkpoints(tmp_path / "copy")
        shutil.copytree(original.path, checkpoints.path)

        def save_and_remove(checkpoints: Checkpoints = checkpoints) -> None:
            save(checkpoints, 30)
            checkpoints.keep(2)

        was_killed = killed_after(limit, save_and_remove)
        opened = Checkpoint.open(checkpoints.latest())
        opened.verify(opened.files)
        assert opened.step in (20, 30) if was_killed else opened.step == 30
        checkpoints.sweep()
        checkpoints.roll_back_to(opened.step)
        assert not [name for name in names(checkpoints) if name.startswith(".")]
        # The next attempt can save the same step again.
        if opened.step == 20:
            assert save(checkpoints, 30).step == 30
            checkpoints.keep(2)
        shutil.rmtree(checkpoints.path)
        if not was_killed:
            break
    assert not was_killed and limit > 15


def test_files_are_synced_before_rename_and_pointer_update(checkpoints, monkeypatch) -> None:
    events: list[tuple[str, str]] = []

    def recording(kind: str, inner, name):
        def call(*args):
            events.append((kind, name(*args)))
            return inner(*args)

        return call

    def relative(path: str | Path) -> str:
        return os.path.relpath(path, checkpoints.path)

    monkeypatch.setattr(
        os, "fsync", recording("sync", os.fsync, lambda number: relative(os.readlink(f"/proc/self/fd/{number}")))
    )
    monkeypatch.setattr(Path, "rename", recording("name", Path.rename, lambda _, new: relative(new)))
    monkeypatch.setattr(Path, "replace", recording("name", Path.replace, lambda _, new: relative(new)))
    save(checkpoints, 10)
    hidden = ".step_000010"
    files = [f"{hidden}/actor/__0_0.distcp", f"{hidden}/actor/__1_0.distcp", f"{hidden}/actor/.metadata"]
    synced = {*files, f"{hidden}/manifest.json", f"{hidden}/actor", hidden}
    named, pointed = events.index(("name", "step_000010")), events.index(("name", "latest"))
    assert {path for kind, path in events[:named] if kind == "sync"} == synced
    assert events[named + 1 : pointed] == [("sync", "."), ("sync", ".latest")]
    assert events[pointed + 1 :] == [("sync", ".")]


def test_checkpoint_with_an_open_file_is_removed_later(checkpoints: Checkpoints, monkeypatch) -> None:
    """On NFS, the folder of an open file cannot be removed."""

    def rmdir(*_, **__) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    save(checkpoints, 10, 20)
    with monkeypatch.context() as patches:
        patches.setattr(os, "rmdir", rmdir)
        checkpoints.keep(1)
        save(checkpoints, 30)
    assert names(checkpoints) == [".step_000010.removed", "latest", "step_000020", "step_000030"]
    save(checkpoints, 40)
    assert names(checkpoints) == ["latest", "step_000020", "step_000030", "step_000040"]


def test_incomplete_checkpoint_is_removed_by_the_next_save(checkpoints: Checkpoints) -> None:
    write(checkpoints, 10)
    assert names(checkpoints) == [".step_000010"]
    save(checkpoints, 20)
    assert names(checkpoints) == ["latest", "step_000020"]


def test_rank_notes_are_not_part_of_a_checkpoint(checkpoints: Checkpoints) -> None:
    files = write(checkpoints, 10)
    hidden, [shared, *by_rank] = checkpoints.path / ".step_000010", sorted(files, key=lambda record: record.path)
    for rank, record in enumerate(by_rank):
        assert noted_files(hidden, "actor", 2) is None
        write_note(hidden / "actor", rank, [replace(record, path=record.path.removeprefix("actor/"))])
    assert noted_files(hidden, "actor", 2) == by_rank
    saved = checkpoints.commit(10, STATE, [shared, *by_rank])
    assert {f"actor/{file.name}" for file in (saved.path / "actor").iterdir()} == {record.path for record in files}


def test_commit_with_a_missing_file_raises(checkpoints: Checkpoints) -> None:
    files = write(checkpoints, 10)
    (checkpoints.path / ".step_000010" / "actor" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata is missing"):
        checkpoints.commit(10, STATE, files)
    assert checkpoints.latest() is None


def test_full_disk_raises_with_the_arithmetic(checkpoints: Checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 5 * 10**9, 5 * 10**9)
    )
    checkpoints.require_space(2 * 10**9, keep=1, number=2)
    with pytest.raises(ValueError) as error:
        checkpoints.require_space(2 * 10**9, keep=2, number=3)
    assert str(error.value) == (
        f"checkpoint.keep=2: {checkpoints.path} has 5.00 GB free, but 3 more checkpoints need 3 x 2.00 = 6.00 GB "
        "(megarl writes a new one before it removes the oldest). Fix: free disk space, lower checkpoint.keep, or set "
        "checkpoint.every_steps=null and checkpoint.on_signal=false"
    )


@pytest.mark.parametrize("kind", ["pipe", "link", "digits"])
def test_odd_pointers_are_named(checkpoints: Checkpoints, kind: str) -> None:
    save(checkpoints, 1)
    pointer = checkpoints.path / "latest"
    pointer.unlink()
    if kind == "pipe":
        os.mkfifo(pointer)
    elif kind == "link":
        pointer.symlink_to("/dev/zero")
    else:
        pointer.write_text("step_" + "1" * 5000)
    with pytest.raises(UserError, match=r"latest: (not a regular file|a symbolic link|'step_1+' is not the name)"):
        checkpoints.latest()


def test_pointers_do_not_follow_links(checkpoints: Checkpoints, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    save(checkpoints, 1)
    (checkpoints.path / ".latest").symlink_to(victim)
    save(checkpoints, 2)
    assert victim.read_text() == "mine" and checkpoints.latest() == checkpoints.path / "step_000002"


RECORD = {"path": "a", "num_bytes": 1, "sha256": "0"}
CONTENT = {"format_version": 1, "step": 1, "state": {}, "files": []}


@pytest.mark.parametrize(
    "content",
    [
        *([1], "text", None, CONTENT | {"step": 1e400}, CONTENT | {"state": [1]}, CONTENT | {"files": None}),
        *(CONTENT | {"files": [RECORD | {"path": path}]} for path in ("a" * 5000, "a\0b", 5, ".")),
    ],
    ids=range(10),
)
def test_odd_manifests_are_damage(tmp_path: Path, content) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"sha256": _digest(content), "content": content}))
    with pytest.raises(DamagedCheckpoint, match=r"step_000001: .* (is (corrupt|missing)|is not|describe).*\. Fix: "):
        Checkpoint.open(folder)


@pytest.mark.parametrize("text", ["5", "[]", "null", '"content"'])
def test_other_json_is_not_a_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert not is_checkpoint(tmp_path)
