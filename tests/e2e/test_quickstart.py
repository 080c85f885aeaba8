"""The README's training commands on the real pretrained model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.readme import ROOT, commands
from tests.timing import LEARNING_S

pytestmark = [pytest.mark.slow, pytest.mark.learn, pytest.mark.timeout(2500)]


def run(arguments: list[str], folder: Path) -> list[dict]:
    """Run megarl, which must succeed. Return the metrics of each step."""
    command = [sys.executable, "-m", "megarl.cli", *arguments, f"run.folder={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LEARNING_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in (folder / "latest" / "metrics.jsonl").read_text().splitlines()]


def test_quickstart_learns_additions(tmp_path):
    # --no-print-directory, because a nested make would also print its directory.
    command = ["make", "-n", "--no-print-directory", "quickstart"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert recipe[-1] == ".venv/bin/megarl train configs/quickstart.yaml"
    rewards = [step["reward/mean"] for step in run(["train", "configs/quickstart.yaml"], tmp_path)]
    assert len(rewards) == 14
    assert rewards[0] <= 0.3
    assert fmean(rewards[-3:]) >= 0.85


def test_quickstart_learns_in_bfloat16_at_the_same_rate(tmp_path):
    """Updates of 1e-5 are at most a fiftieth of a weight's bfloat16 spacing: only stochastic rounding applies them."""
    steps = run(["train", "configs/quickstart.yaml", "model.dtype=bfloat16"], tmp_path)
    assert fmean(step["reward/mean"] for step in steps[-3:]) >= 0.85
    assert all(0.01 < step["update/changed_frac"] < 0.2 for step in steps)


def test_readme_run_makes_one_step(tmp_path):
    [command] = [command for command in commands() if command.startswith(".venv/bin/megarl train")]
    steps = run(shlex.split(command)[1:], tmp_path)
    assert [step["step"] for step in steps] == [1]
