"""Other users of the machine plant files in a run's scratch folders and in /dev/shm."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from megarl.cluster.supervision import scratch, segments
from megarl.cluster.supervision.ownership import Untrusted
from megarl.cluster.supervision.scratch import make_scratch, ray_folder, sweep

OTHER_USER = 65534
IS_ROOT = os.geteuid() == 0
"""Whether this process is root, which can give files to other users. Otherwise, it pretends to be another user."""


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "PLACE", tmp_path)


@pytest.fixture
def own_segment() -> Iterator[Path]:
    file = segments.SHARED_MEMORY / f"megarl-test-{uuid4().hex}"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def dead_scratch(place: Path, earlier: str = "", note: str = "") -> Path:
    """Create the scratch folder of a run that has ended."""
    folder = place / "megarl-abcd_123"
    folder.mkdir(mode=0o700)
    (folder / scratch.LOCK).touch()
    (folder / segments.EARLIER).write_text(earlier)
    (folder / f"{segments.NOTE}.1").write_text(note)
    return folder


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_ROOT:
        os.chown(folder, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)


def note_of(file: Path, name: str) -> str:
    return f"{file.stat().st_ino} {name}\n"


def assert_skipped(folder: Path, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep()
    assert folder.is_dir()
    assert capsys.readouterr().out == f"megarl: note: skipped scratch folders: {folder} ({reason})\n"


@pytest.mark.parametrize("name", ["{0}", "../..{0}", "./{1}", "../shm/{1}", "..", "."])
def test_note_with_a_path_removes_no_file(
    tmp_path: Path, own_segment: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    written = name.format(victim, own_segment.name)
    folder = dead_scratch(tmp_path, note=note_of(Path("/dev/shm") / written, written))
    assert_skipped(folder, "segments.1 is not a list of segments", capsys)
    assert victim.exists() and own_segment.exists()


def test_folder_of_another_user_is_skipped(
    tmp_path: Path, own_segment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dead_scratch(tmp_path, note=note_of(own_segment, own_segment.name))
    give_away(folder, monkeypatch)
    assert_skipped(folder, "another user owns it", capsys)
    assert own_segment.exists()


def test_folder_that_others_may_write_to_is_skipped(
    tmp_path: Path, own_segment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dead_scratch(tmp_path, note=note_of(own_segment, own_segment.name))
    folder.chmod(0o777)
    assert_skipped(folder, "other users may write to it (mode 777)", capsys)
    assert own_segment.exists()


@pytest.mark.parametrize("name", [scratch.LOCK, segments.EARLIER, f"{segments.NOTE}.1"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "socket", "folder", *["foreign"][:IS_ROOT]])
def test_planted_file_neither_hangs_nor_ends_a_run(
    tmp_path: Path, own_segment: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    folder = dead_scratch(tmp_path, note=note_of(own_segment, own_segment.name))
    file = folder / name
    target = tmp_path / "target"
    target.write_bytes(file.read_bytes())
    if kind == "foreign":
        os.chown(file, OTHER_USER, -1)
    else:
        file.unlink()
        {
            "fifo": lambda: os.mkfifo(file),
            "link": lambda: file.symlink_to(target),
            "dangling link": lambda: file.symlink_to("missing"),
            "socket": lambda: os.mknod(file, stat.S_IFSOCK | 0o600),
            "folder": file.mkdir,
        }[kind]()
    sweep()
    assert capsys.readouterr().out.count("\n") == 1
    assert folder.is_dir() and own_segment.exists()


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "1\n",
        "1 \n",
        "one name\n",
        "-1 name\n",
        "1 a\0b\n",
        "1 name",
        "9" * 5000 + " name\n",
        "\n",
        "1 " + "n" * 256 + "\n",
    ],
)
@pytest.mark.parametrize("name", [segments.EARLIER, f"{segments.NOTE}.1"])
def test_malformed_note_skips_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    folder = dead_scratch(tmp_path)
    (folder / name).write_text(text)
    assert_skipped(folder, f"{name} is not a list of segments", capsys)


def test_link_to_a_scratch_folder_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = tmp_path / "elsewhere"
    victim.mkdir()
    (tmp_path / "megarl-abcd_123").symlink_to(dead_scratch(victim))
    assert_skipped(tmp_path / "megarl-abcd_123", "megarl-abcd_123: Not a directory", capsys)


def test_folder_without_lock_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dead_scratch(tmp_path)
    (folder / scratch.LOCK).unlink()
    assert_skipped(folder, "lock: No such file or directory", capsys)


def test_folder_on_a_disk_without_locks_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error does not name the file."""
    folder = dead_scratch(tmp_path)

    def flock(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert_skipped(folder, f"{folder.name}: No locks available", capsys)


def test_plain_file_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "megarl-abcd_123").touch()
    sweep()
    assert file.is_file() and "(megarl-abcd_123: Not a directory)" in capsys.readouterr().out


def test_folder_that_is_being_created_or_removed_is_not_mentioned(tmp_path: Path, capsys) -> None:
    (tmp_path / "megarl-abcd_123").mkdir(mode=0o700)
    sweep()
    assert (tmp_path / "megarl-abcd_123").is_dir() and not capsys.readouterr().out


def test_one_line_names_at_most_three_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(9):
        (folder := tmp_path / f"megarl-abcd_12{number}").mkdir(mode=0o700)
        (folder / "file").touch()
    for name in ("megarl-notes", "megarl-\x1b[31mevil", "megarl-a\nb_12345"):  # not named like scratch folders
        (tmp_path / name).mkdir()
    sweep()
    [line] = capsys.readouterr().out.splitlines()
    assert line.count("lock: ") == 3 and line.endswith(" and 6 more")


def succeeds_for_another_user(attack: Callable[[], object]) -> bool:
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        try:
            attack()
        except PermissionError:
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize("umask", [0o022, 0])
def test_other_users_cannot_access_the_scratch_folder(tmp_path: Path, umask: int) -> None:
    earlier = os.umask(umask)
    try:
        folder = make_scratch()
        segments.note_earlier(folder)
    finally:
        os.umask(earlier)
    ray_folder(folder).mkdir()
    ray_folder(folder).chmod(0o777)  # as Ray does
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if IS_ROOT:
        for path in (tmp_path, *tmp_path.parents[:-2]):
            path.chmod(0o755)
        assert succeeds_for_another_user(lambda: os.listdir(tmp_path))
        attacks = [
            lambda: (folder / "segments.7").write_text("1 name"),
            lambda: (ray_folder(folder) / "planted").touch(),
            lambda: os.listdir(ray_folder(folder)),
            lambda: ray_folder(folder).rename(folder / "moved"),
        ]
        assert not any(map(succeeds_for_another_user, attacks))


def test_notes_are_not_written_to_another_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleanup job may remove a run's folder from /tmp, and then another user may take its name."""
    folder = dead_scratch(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("text")
    (folder / f".{segments.NOTE}.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        segments.note(folder)
    give_away(folder, monkeypatch)
    for use in (segments.note, segments.note_earlier, segments.created):
        with pytest.raises(Untrusted, match="another user owns it"):
            use(folder)
    scratch.remove_scratch(folder)
    assert folder.exists() and victim.read_text() == "text"


def test_segment_names_with_line_breaks_are_not_noted(tmp_path: Path) -> None:
    file = segments.SHARED_MEMORY / f"megarl-test-{uuid4().hex}\n1 name"
    file.touch()
    try:
        folder = make_scratch()
        segments.note_earlier(folder)
        assert "1 name" not in (folder / segments.EARLIER).read_text()
    finally:
        file.unlink()


def test_socket_paths_of_ray_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    session = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1234567890"
    assert len(str(ray_folder(scratch.PLACE / "megarl-12345678") / session)) <= 107
