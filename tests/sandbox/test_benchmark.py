"""The benchmark of sandboxes measures what its figures show."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.paths import ROOT
from tools.benchmarks import figures


def test_sandboxes_are_measured_with_the_figures_that_are_shown(provider, tmp_path, monkeypatch):
    script = [sys.executable, ROOT / "tools/benchmarks/sandbox.py", "--count", "10", "--at-once", "1"]
    subprocess.run([*script, "--out", tmp_path / "sandbox.json"], cwd=ROOT, check=True)
    runs = json.loads((tmp_path / "sandbox.json").read_text())["runs"]
    assert [run["programs"] for run in runs.values()] == [10, 10, 10]
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    shown = figures.sandbox()
    assert all(f"| {name} | {run['per_second']:.1f} (target 20)" in shown for name, run in runs.items())
