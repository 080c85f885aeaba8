"""Tests that the environment's build finds the CPU build of torch, or prints one line with the remedy. Python and pip
are stubs. The test sets the indexes that have torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

BUILD = ROOT / "tools" / "environment" / "build.sh"
PYTORCH = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0+cpu"
LOCK = f"""
# The packages.
attrs==26.1.0 --hash=sha256:a1 --hash=sha256:a2
{TORCH} --hash=sha256:b # kept
newer==1.0.0 --hash=sha256:d # any-python
zss==1.2.0 --hash=sha256:c # source
"""

PYTHON = """#!/usr/bin/env bash
[[ $1 == -m && $2 == venv ]] || exit 0
mkdir -p "$3/bin"
cp "$STUBS/pip" "$STUBS/python" "$3/bin"
"""

PIP = f"""#!/usr/bin/env bash
[[ " $* " == *" --requirement "* ]] && packages=$(cut --delimiter='=' --fields=1 "${{@: -1}}" | tr '\\n' ' ')
echo "$*: $packages" >>"$STUBS/calls"
[[ $packages == "torch " ]] || exit 0
for index in $INDEXES_WITH_TORCH; do
    [[ $index == configured || "$*" == *"--index-url $index "* ]] && exit 0
done
echo "ERROR: Could not find a version that satisfies the requirement {TORCH} (from versions: 2.13.0)" >&2
echo "ERROR: No matching distribution found for {TORCH}" >&2
exit 1
"""


@pytest.fixture
def build(tmp_path):
    """Return a function that runs the build, given the indexes that have torch. It returns the finished process, the
    calls of pip and the environment's folder."""
    for name, stub in (("python", PYTHON), ("pip", PIP)):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "lock").write_text(LOCK)
    (tmp_path / "calls").touch()

    def run(*indexes: str) -> tuple[subprocess.CompletedProcess[str], list[str], Path]:
        environment = os.environ | {"STUBS": str(tmp_path), "INDEXES_WITH_TORCH": " ".join(indexes)}
        arguments = [BUILD, tmp_path / "python", tmp_path / "venv", tmp_path / "lock"]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done, (tmp_path / "calls").read_text().splitlines(), tmp_path / "venv"

    return run


def test_configured_indexes_are_tried_first(build):
    done, calls, venv = build("configured", PYTORCH)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any("--index-url" in call for call in calls)
    assert [call.split(": ")[1] for call in calls] == ["torch ", "attrs torch ", "newer ", "zss ", ""]
    assert ["--require-hashes" in call for call in calls] == [True, True, True, True, False]
    assert ["--ignore-requires-python" in call for call in calls] == [False, False, True, False, False]
    assert ["--no-build-isolation" in call for call in calls] == [False, False, False, True, True]
    assert venv.is_dir()


def test_pytorch_index_is_the_fallback(build):
    done, calls, venv = build(PYTORCH)
    assert (done.returncode, done.stderr) == (0, "")
    assert [f"--index-url {PYTORCH} " in call for call in calls] == [False, True, False, False, False, False]
    assert venv.is_dir()


def test_missing_torch_build_prints_a_one_line_remedy(build):
    done, calls, venv = build()
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert all(part in line for part in (TORCH, PYTORCH, "No matching distribution", "set PIP_EXTRA_INDEX_URL"))
    assert len(calls) == 2
    assert not venv.exists()


def test_unsupported_python_is_rejected_first(build, tmp_path):
    (tmp_path / "python").write_text("#!/usr/bin/env bash\nexit 1\n")
    done, calls, venv = build("configured")
    assert done.returncode == 1
    assert "make PYTHON=" in done.stderr
    assert not calls and not venv.exists()
