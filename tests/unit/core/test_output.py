"""Output that the terminal, pipe or disk rejects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

ENDED = 7
RUN = f"""
import os, sys
from megarl.cluster.supervision.supervisor import supervised

with supervised():
    for number in range(3):
        print("step", number, "x" * 10_000, flush=True)
        print("warning", file=sys.stderr)
    sys.exit({ENDED})
"""


def test_run_continues_without_a_reader():
    """The reader of the log, such as `head`, exits before the run."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", RUN]
    process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    assert process.wait() == ENDED


def test_run_continues_on_a_full_disk():
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, stdout=full, stderr=full).returncode == ENDED


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_unencodable_characters_are_escaped(encoding: str):
    program = "from megarl.core.output import escape_unencodable as escape; escape(); print('ρ ≥ 1')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\\u03c1 \\u2265 1\n", "")
