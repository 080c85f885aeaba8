"""Tests of the exclusive lock of a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import UserError
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
