"""Python programs without user code do not import modules from the working directory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import megarl
from megarl.core.interpreter import PYTHON
from megarl.data.reasoning import Task, reasoning_rows
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from tests.timing import WAIT_S

PLANTED = "open('imported', 'w').close()\nraise SystemExit('imported from the working directory')\n"
ROOT = Path(megarl.__file__).parent

RUN_USER_CODE = {"cluster/megatron_settings.py", "environments/hosts.py", "rewards/pool.py"}


def test_a_program_does_not_import_a_planted_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(PLANTED)
    command = [*PYTHON, "-m", "json.tool", "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert not (tmp_path / "imported").exists()


def test_generated_rows_do_not_import_a_planted_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    assert len(list(reasoning_rows([(Task("basic_arithmetic", {}), 2)], 0))) == 2
    assert not (tmp_path / "imported").exists()


def test_reward_functions_may_import_modules_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 0.5\n")
    (tmp_path / "reward.py").write_text("import beside\n\ndef f(prompt, response, answer):\n    return beside.VALUE\n")
    monkeypatch.chdir(tmp_path)
    pool = FunctionPool(["reward.py:f"], None, 1, WAIT_S)
    assert pool.call("reward.py:f", "", "", "").result() == Result(0.5, "0.5")
    pool.close()


def test_only_programs_that_run_user_code_search_the_working_directory() -> None:
    """models/folder.py sets the working directory itself. The command in core/interpreter.py runs user code."""
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.rglob("*.py")}
    starts = {name for name, text in sources.items() if re.search(r'sys\.executable,\s*"-[mc]"', text)}
    assert starts == {*RUN_USER_CODE, "models/folder.py", "core/interpreter.py"}
