"""The sandbox benchmark measures the numbers shown in its table."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.paths import ROOT
from tools.benchmarks import figures


def test_benchmark_table_shows_the_measured_rates(provider, tmp_path, monkeypatch):
    script = [sys.executable, ROOT / "tools/benchmarks/sandbox.py", "--count", "10", "--at-once", "1"]
    subprocess.run([*script, "--out", tmp_path / "sandbox.json"], cwd=ROOT, check=True)
    runs = json.loads((tmp_path / "sandbox.json").read_text())["runs"]
    assert [run["programs"] for run in runs.values()] == [10, 10, 10]
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    table = figures.render("figures", "sandbox")
    assert all(f"| {name} | {run['per_second']:.1f} |" in table for name, run in runs.items())
