"""A rank's process before it uses its device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import BASE, ROOT

PROGRAM = """
import os, sys
from pathlib import Path
from megarl.cluster.groups.ranks import RankActor
from megarl.cluster.placement import Process
from megarl.config.load import load

logs, answer = map(Path, sys.argv[1:3])
RankActor(load(Path(sys.argv[3]), sys.argv[4:]), "actor", logs, Process("trainer", 0, threads=1), logs)
answer.write_text(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"))
"""


@pytest.mark.parametrize(
    ("layout", "given", "found"),
    [("tp: 2", None, "1"), ("cp: 2", None, "1"), ("pp: 2, dp: 2", None, "unset"), ("tp: 2", "8", "8")],
)
def test_in_layer_parallelism_uses_one_device_connection(
    tmp_path: Path, layout: str, given: str | None, found: str
) -> None:
    """The user's environment takes precedence."""
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    own = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "answer"), str(BASE)]
    overrides = ["model.path=m", "data.source=arithmetic", f"actor.layout={{{layout}}}"]
    subprocess.run([*command, *overrides], cwd=ROOT, env=inherited | own, check=True)
    assert (tmp_path / "answer").read_text() == found
