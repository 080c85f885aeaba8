"""The GPU measurements: a step that fails, hangs or dies does not affect the others, and all steps are defined."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.paths import ROOT
from tools.gpu import first_contact
from tools.gpu.first_contact import RESULT, STEPS, Step, groups_of, run

PROGRAM = """
import os, pathlib, signal, sys, time
name, result = sys.argv[1:]
if name == "import": raise ImportError("no such module")
sys.stdin.readline()
if name == "hang": time.sleep(3600)
if name == "raise": raise RuntimeError("the device failed")
if name == "die": os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(result).write_text('{"value": 1}')
"""


@pytest.fixture
def program(tmp_path, monkeypatch) -> None:
    """Replace the steps' program."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(
        first_contact, "command_of", lambda name, result: [sys.executable, str(path), name, str(result)]
    )


def test_other_steps_run_after_failures(program, tmp_path):
    names = ("import", "fine", "raise", "die", "hang", "fine too")
    steps = [Step(name, 2 if name == "hang" else 600, "beside" if name in ("raise", "die") else "") for name in names]
    result = run(steps, tmp_path / "out", minutes=60)
    outcomes = {name: step["outcome"] for name, step in result["steps"].items()}
    expected = dict.fromkeys(names, "failed") | {"fine": "passed", "fine too": "passed", "hang": "timed out"}
    assert outcomes == expected
    assert result["steps"]["fine"]["figures"] == {"value": 1}
    assert "the device failed" in result["steps"]["raise"]["output"][-1]
    assert "no such module" in result["steps"]["import"]["output"][-1]
    assert json.loads((tmp_path / "out" / RESULT).read_text()) == result


def test_steps_end_with_the_time(program, tmp_path):
    result = run([Step("hang", 600), Step("fine", 600)], tmp_path, minutes=1 / 60)
    assert [step["outcome"] for step in result["steps"].values()] == ["timed out", "not started"]


def test_consecutive_steps_share_the_gpu():
    steps = [Step("a", 1), Step("b", 1, "x"), Step("c", 1, "x"), Step("d", 1), Step("e", 1)]
    assert [[step.name for step in group] for group in groups_of(steps)] == [["a"], ["b", "c"], ["d"], ["e"]]


def test_all_steps_are_defined_and_described():
    """The names are compared as text, because importing steps.py takes seconds."""
    source = (ROOT / "tools/gpu/steps.py").read_text()
    table = source[source.index("STEPS: dict") :]
    defined = re.findall(r'^    "(\w+)": (\w+),$', table, re.MULTILINE)
    assert sorted(name for name, _ in defined) == sorted(step.name for step in STEPS)
    assert all(f"\ndef {function}() -> Figures:" in source for _, function in defined)
    page = (ROOT / "tools/gpu/README.md").read_text()
    assert not [s.name for s in STEPS if f"`{s.name}`" not in page and not s.name.startswith("update_")]
