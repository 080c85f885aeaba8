"""The same run on this machine alone, the reference of runs over several, and what must be the same in both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.run import FAKE_MEGARL, MEGARL, UNCHECKED
from tests.paths import ROOT
from tests.timing import RUN_S

MEASURED = ("time/", "idle/", "cluster/", "memory/", "throughput/", "checkpoint/", "refit/", "logprob_check/")
"""Metrics that no two runs share, or that say how weights travel."""

COMMON = ["actor.threads=1", "rollout.threads=1", "actor.optimizer.lr=0.003", "actor.layout.pp=2", "run.export=true"]


def train_command(shared: Path, name: str, *overrides: str, vllm: bool) -> list[str]:
    """vllm: whether the engines are vLLM's; else they are fake ones (tests.fakes.engine)."""
    program, keys = (MEGARL, overrides) if vllm else (FAKE_MEGARL, (*UNCHECKED, *overrides))
    return [*program, "train", str(shared / "tiny.yaml"), f"run.folder={shared}/runs", f"run.name={name}", *keys]


def on_one_machine(shared: Path, name: str, *overrides: str, vllm: bool = False) -> Path:
    command = train_command(shared, name, *overrides, vllm=vllm)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return shared / "runs" / name


def learned(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def check_same(run: Path, alone: Path) -> None:
    """Metrics, samples and weights are the same bit for bit."""
    assert learned(run) == learned(alone)
    for file in sorted((alone / "rollouts").iterdir()):
        assert (run / "rollouts" / file.name).read_text() == file.read_text()
    theirs, ours = (load_file(folder / "model" / "model.safetensors") for folder in (alone, run))
    assert theirs.keys() == ours.keys() and all(bool((ours[name] == theirs[name]).all()) for name in theirs)
