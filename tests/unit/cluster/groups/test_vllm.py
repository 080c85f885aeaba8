"""The engine process before it imports vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, subprocess, sys, tempfile
from pathlib import Path
from megarl.cluster.groups.vllm import VllmActor
from megarl.cluster.placement import Process

class Actor(VllmActor):
    def _arguments(self):
        return {}

    def _load(self, arguments):
        return None

logs, scratch, answer = map(Path, sys.argv[1:])
tempfile.gettempdir()  # Python remembers the answer
os.environ["MEGARL_SCRATCH"] = str(scratch)
Actor(None, scratch, Process("engine", 0, threads=1, devices=(0,)), [], logs)
child = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
of_child = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
answer.write_text(f"{tempfile.gettempdir()} {of_child}")
"""


def test_engine_ranks_use_the_temporary_folder_of_the_run(tmp_path: Path) -> None:
    """vLLM creates files in the temporary folder for the rendezvous of its ranks."""
    logs, scratch, answer = (tmp_path / name for name in ("logs", "scratch", "answer"))
    logs.mkdir()
    scratch.mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, str(logs), str(scratch), str(answer)], check=True)
    assert answer.read_text().split() == [str(scratch)] * 2
