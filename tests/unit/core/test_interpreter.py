"""Python programs that megarl starts do not import modules from the working directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.job_config import JobConfig

from megarl.cluster.session import _JobConfig
from megarl.core.interpreter import MARK, PYTHON, ROOT, VARIABLE, keep_importable, protect_children
from megarl.rewards.pool import _start_child
from megarl.usercode.child_process import ChildFailure, ChildProcess

PLANTED = "open('imported', 'w').close()\nraise SystemExit('imported from the working directory')\n"


def test_a_program_does_not_import_a_planted_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(PLANTED)
    command = [*PYTHON, "-m", "json.tool", "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert not (tmp_path / "imported").exists()


def test_the_reward_process_does_not_import_a_planted_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildFailure):
        _start_child().call(b"not JSON\n", 60)  # its answer is an exit, after all imports
    assert not (tmp_path / "imported").exists()


def test_ray_does_not_add_the_working_directory_to_the_workers_path() -> None:
    """Ray adds it unless the job has a working directory of its own."""
    assert not JobConfig()._runtime_env_has_working_dir()
    assert _JobConfig()._runtime_env_has_working_dir()


def test_all_programs_are_started_without_the_working_directory() -> None:
    """models/folder.py sets the working directory itself."""
    sources = {file.relative_to(ROOT): file.read_text() for file in (ROOT / "megarl").rglob("*.py")}
    unsafe = [str(file) for file, text in sources.items() if re.search(r'sys\.executable,\s*"-[mc]"', text)]
    assert unsafe == ["megarl/models/folder.py"]


def test_children_can_import_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", "/first")
    keep_importable()
    assert os.environ["PYTHONPATH"] == f"/first:{ROOT}"
    code = f"import sys; sys.exit(not {str(ROOT)!r} in sys.path)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_other_working_directories_are_not_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/first")
    keep_importable()
    assert os.environ["PYTHONPATH"] == "/first"


SPAWNS = """
import multiprocessing, os, sys
def work(): pass
if __name__ == "__main__":
    os.chdir(sys.argv[1])
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start(), process.join()
    sys.exit(process.exitcode)
"""


def test_spawned_processes_do_not_import_planted_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as vLLM's, which multiprocessing starts in the worker's working directory."""
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "multiprocessing.py").write_text(PLANTED)
    script = tmp_path / "folder" / "spawns.py"
    script.parent.mkdir()
    script.write_text(SPAWNS)
    command = [sys.executable, script, tmp_path]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode and (tmp_path / "imported").exists()
    (tmp_path / "imported").unlink()
    protect_children()
    assert subprocess.run(command).returncode == 0 and not (tmp_path / "imported").exists()


@pytest.mark.parametrize(("value", "passed"), [(MARK, None), ("1", "1")])
def test_user_code_may_import_from_its_programs_folders(monkeypatch: pytest.MonkeyPatch, value, passed) -> None:
    monkeypatch.setenv(VARIABLE, value)
    send = f"send(b'[\"%s\"]\\n' % os.environb.get(b'{VARIABLE}', b'None'))"
    code = f"import os, socket, sys; socket.socket(fileno=int(sys.argv[1])).{send}"
    child = ChildProcess([*PYTHON, "-c", code])
    assert child._read_line(None) == f'["{passed}"]'.encode()
    child.kill()
