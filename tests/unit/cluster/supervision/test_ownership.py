"""Other users of the machine plant files in a run's scratch folders and in /dev/shm."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from megarl.cluster.supervision import scratch, segments
from megarl.cluster.supervision.ownership import Untrusted
from megarl.cluster.supervision.scratch import make_scratch, ray_folder, sweep
from tests.timing import WAIT_S

OTHER_USER = 65534


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


@pytest.mark.parametrize(
    "change", [lambda f: os.chown(f, OTHER_USER, -1), lambda f: f.chmod(0o777)], ids=["uid", "mode"]
)
def test_folder_of_another_user_is_skipped(
    tmp_path: Path, own_segment: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    folder = dead_scratch(tmp_path, note=note_of(own_segment, own_segment.name))
    change(folder)
    is_own = folder.stat().st_uid == os.geteuid()
    assert_skipped(folder, "other users may write to it (mode 777)" if is_own else "another user owns it", capsys)
    assert own_segment.exists()


@pytest.mark.parametrize("name", [scratch.LOCK, segments.EARLIER, f"{segments.NOTE}.1"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "socket", "folder", "foreign"])
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


def test_one_line_names_at_most_three_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(9):
        (tmp_path / f"megarl-abcd_12{number}").mkdir(mode=0o700)
    for name in ("megarl-notes", "megarl-\x1b[31mevil", "megarl-a\nb_12345"):  # not in the form of scratch folders
        (tmp_path / name).mkdir()
    sweep()
    [line] = capsys.readouterr().out.splitlines()
    assert line.count("lock: ") == 3 and line.endswith(" and 6 more")


ATTACK = """
import os, stat, sys
from pathlib import Path
folder = Path(sys.argv[1])
for attack in (
    lambda: (folder / "segments.7").write_text("1 /etc/hosts"),
    lambda: (folder / "ray" / "planted").touch(),
    lambda: os.listdir(folder),
    lambda: os.rename(folder / "ray", folder / "moved"),
):
    try:
        attack()
    except PermissionError:
        continue
    sys.exit("attack succeeded")
"""


@pytest.mark.parametrize("umask", [0o022, 0])
def test_other_users_cannot_write_to_the_scratch_folder(tmp_path: Path, umask: int) -> None:
    earlier = os.umask(umask)
    try:
        folder = make_scratch()
        ray_folder(folder).mkdir()
        ray_folder(folder).chmod(0o777)  # as Ray does
    finally:
        os.umask(earlier)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    options = dict(user=OTHER_USER, group=OTHER_USER, extra_groups=[], cwd="/", timeout=WAIT_S)
    done = subprocess.run([sys.executable, "-I", "-c", ATTACK, str(folder)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr


def test_notes_are_not_written_to_another_users_folder(tmp_path: Path) -> None:
    """A cleaner of /tmp may remove a run's folder; then another user may take its name."""
    folder = dead_scratch(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("text")
    (folder / f".{segments.NOTE}.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        segments.note(folder)
    os.chown(folder, OTHER_USER, -1)
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
