"""A single-machine run as the reference for multi-machine runs, and the comparison of the two."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.run import megarl
from tests.metrics import MEASURED
from tests.paths import ROOT
from tests.timing import RUN_S

VARYING = (*MEASURED, "refit/", "logprob_check/", "recovery/")
"""Prefixes of metrics that differ between any two runs, that depend on the weights' transport, or that count faults."""

COMMON = ["actor.threads=1", "rollout.threads=1", "actor.optimizer.lr=0.003", "actor.layout.pp=2", "run.export=true"]


def train_command(shared: Path, name: str, *overrides: str, vllm: bool, megatron: bool) -> list[str]:
    """Return the command of a run. For `vllm` and `megatron`, see tests.e2e.run.megarl."""
    program, keys = megarl(vllm, megatron)
    folder = f"run.folder={shared}/runs"
    return [*program, "train", str(shared / "tiny.yaml"), folder, f"run.name={name}", *keys, *overrides]


def on_one_machine(shared: Path, name: str, *overrides: str, vllm: bool = False, megatron: bool = False) -> Path:
    command = train_command(shared, name, *overrides, vllm=vllm, megatron=megatron)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return shared / "runs" / name


def learned(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(VARYING)} for line in lines]


def check_same(run: Path, alone: Path) -> None:
    """Check that metrics, samples and weights are bitwise equal."""
    assert learned(run) == learned(alone)
    for file in sorted((alone / "rollouts").iterdir()):
        assert (run / "rollouts" / file.name).read_text() == file.read_text()
    expected, weights = (load_file(folder / "model" / "model.safetensors") for folder in (alone, run))
    assert expected.keys() == weights.keys()
    assert all(bool((weights[name] == expected[name]).all()) for name in expected)
