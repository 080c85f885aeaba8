"""Tests of the exclusive lock of a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.run import lock
from megarl.run.lock import run_lock

HOLDER = """
import sys
from pathlib import Path
from megarl.run.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_names_its_holder_until_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        message = re.escape(f"{folder} is in use by process {holder.pid} on {platform.node()}. Fix: ")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^run.name=a: {message}"), run_lock(folder):
                pass
        with run_lock(folder.with_name("b")):
            holder.kill()
            holder.wait()
        with (
            run_lock(folder),
            pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on"),
            run_lock(folder),
        ):
            pass
        with run_lock(folder):
            pass


def test_file_system_without_locks_causes_a_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(number: int) -> None:
        def flock(*_) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    fail(errno.ENOSYS)
    with run_lock(tmp_path / "a"):
        expected = f"{tmp_path}/.a.lock: this file system has no file locks (Function not impl"
        assert capsys.readouterr().out.startswith(expected)
    fail(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), run_lock(tmp_path / "a"):
        pass


@pytest.mark.parametrize(("folder", "why"), [("taken", "File exists"), ("taken/runs", "Not a directory")])
def test_folder_that_is_not_writable_raises(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "taken").write_text("a file")
    place = tmp_path / folder
    line = f"run.folder={place}: not writable ({why}: {place}). Fix: set run.folder to a writable folder"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"), run_lock(place / "a"):
        pass


def test_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    """Another user may create the link if the runs are in a shared folder."""
    victim = tmp_path / "victim"
    victim.write_text("text")
    (tmp_path / ".a.lock").symlink_to(victim)
    with pytest.raises(UserError, match=r"not writable \(Too many levels of symbolic links: .*\.a\.lock\)\. Fix: set"):
        run_lock(tmp_path / "a").__enter__()
    assert victim.read_text() == "text"


READER = """
import fcntl, os, sys
os.setuid(65534)
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
except PermissionError:
    print("refused")
"""


@pytest.mark.parametrize("earlier_mode", [None, 0o644, 0o666])
def test_other_users_cannot_open_the_lock(tmp_path: Path, earlier_mode: int | None) -> None:
    file = tmp_path / ".a.lock"
    if earlier_mode is not None:
        file.touch()
        file.chmod(earlier_mode)
    with run_lock(tmp_path / "a"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if os.geteuid() == 0:
        for folder in (tmp_path, *tmp_path.parents):
            folder.chmod(folder.stat().st_mode | 0o011)
        command = [sys.executable, "-c", READER, str(file)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused\n"


def test_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / ".a.lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(lock, "_uid_of_new_files", lambda _: 12345)
    with pytest.raises(UserError, match=r"\.a\.lock: not a regular file of this user\. Fix: remove it"):
        run_lock(tmp_path / "a").__enter__()


def test_lock_on_a_file_system_that_replaces_user_ids(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for _ in range(2):
        with run_lock(tmp_path / "a"):
            pass


def test_holder_that_wrote_nothing_is_named(tmp_path: Path) -> None:
    """The kernel names the process. The file may have any content."""
    file = tmp_path / ".a.lock"
    file.write_bytes(b"\xff\xfe\n" * 2**20)
    code = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, 2); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as raised, run_lock(tmp_path / "a"):
            pass
        assert f"is in use by process {holder.pid} on {platform.node()}. Fix: " in str(raised.value)
        holder.stdin.close()


def test_pipe_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".a.lock")
    with pytest.raises(UserError, match=r"not a regular file of this user"), run_lock(tmp_path / "a"):
        pass
