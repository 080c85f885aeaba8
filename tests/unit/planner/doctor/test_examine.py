"""`megarl doctor` end to end: output, exit code, and independence of the packages that it checks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from megarl.planner.doctor import Finding
from megarl.planner.doctor.examine import table
from tests.paths import ROOT
from tests.timing import DOCTOR_CPU_S, WAIT_S


def doctor(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    command = [*python, "-m", "megarl.cli", "doctor", *arguments]
    before = cpu_seconds()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert cpu_seconds() - before < DOCTOR_CPU_S
    return done


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_doctor_finds_no_problems_in_test_environment(tmp_path):
    done = doctor("--folder", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "no problems found"


def test_findings_are_printed_as_json(tmp_path):
    findings = json.loads(doctor("--json", "--folder", str(tmp_path)).stdout)
    assert {"name", "state", "found", "wanted", "fix"} == set(findings[0])
    assert {"Python", "torch", "GPUs", "shared memory"} <= {finding["name"] for finding in findings}


def test_missing_packages_are_problems_with_fixes(tmp_path):
    """Site packages are hidden; the core's dependencies come from the path."""
    code = (
        "import sys, importlib.metadata as m; from megarl.planner.doctor import packages\n"
        "packages.installed = lambda names: None\n"
        "from megarl import cli; sys.argv = ['megarl', 'doctor']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    assert "! torch" in done.stdout and "→ pip install 'torch" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("problems: torch, megatron-core, vllm, ray, transformers")


@pytest.mark.parametrize("state", ["ok", "note", "problem"])
def test_fix_is_printed_below_its_finding(state):
    lines = table([Finding("a", state, "1", ">2", "do this"), Finding("long", "ok", "22")]).splitlines()
    assert lines[0].split() == [*({"ok": [], "note": ["·"], "problem": ["!"]}[state]), "a", "1", "(>2)"]
    assert lines[1].strip() == "→ do this"
    assert lines[-1] == ("problems: a" if state == "problem" else "no problems found")
