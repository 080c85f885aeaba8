"""Tests which nodes the job script's `requeue` function excludes, with fake Slurm commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megarl.launch.script import TEMPLATE

FAKES = """
scontrol() {{ echo "scontrol $*"; }}
sinfo() {{ printf '%s\\n' n0 n1 n2 n3 n3; }}  # a node is listed once for each partition
is_current() {{ true; }}
id=7 job={job} SLURM_JOB_NUM_NODES={size} SLURM_JOB_PARTITION=main
"""


@pytest.mark.parametrize(
    ("size", "bad", "excluded", "kept"),
    [
        (3, [], None, []),
        (3, ["n1", "n1"], "n1", ["n1", "n1"]),
        (4, ["n1"], "", []),  # the job would wait for a fourth node forever
        (3, ["n1", "n3"], "", []),
    ],
)
def test_bad_nodes_are_excluded_while_there_are_others(
    size: int, bad: list[str], excluded: str | None, kept: list[str], tmp_path: Path
) -> None:
    [function] = re.findall(r"^requeue\(\) \{\n.*?^\}\n", TEMPLATE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "bad_nodes"
    file.write_text("".join(f"{node}\n" for node in bad))
    script = FAKES.format(job=tmp_path, size=size) + function + "requeue 'a reason'"
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    commands = [line for line in done.stdout.splitlines() if line.startswith("scontrol")]
    update = [] if excluded is None else [f"scontrol update JobId=7 ExcNodeList={excluded}"]
    assert commands == ["scontrol requeue 7", *update]
    assert file.read_text().split() == kept
