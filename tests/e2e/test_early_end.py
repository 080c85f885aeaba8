"""A run starts from the latest run's model, is interrupted, and resumes with the command that it printed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl.run.checkpoints import Checkpoints
from tests.e2e.run import Run
from tests.e2e.test_recipes import TINY
from tests.paths import CONFIGS, ROOT
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def conversation(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "1"}]}


def test_latest_model_is_resolved_and_printed_command_resumes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(64)))
    recipe = CONFIGS / "smollm2-cpu-sft.yaml"
    keys = [*TINY, f"data.source={tmp_path}/rows.jsonl"]
    first = write_tiny_llama(tmp_path / "model", num_kv_heads=2)
    with Run(
        recipe, tmp_path, *keys, "run.name=tiny", f"model.path={first}", "run.steps=1", "run.export=true", vllm=True
    ) as run:
        assert run.end(seconds=RUN_S) == 0, run.errors

    second = [f"model.path={tmp_path}/latest/model", "run.name=second", "run.steps=1000000", "checkpoint.every_steps=1"]
    with Run(recipe, tmp_path, *keys, *second, vllm=True) as run:
        run.folder = tmp_path / "second"
        run.wait_for_step(3)
        os.killpg(run.pid, signal.SIGINT)
        assert run.end() == 130
    config = yaml.safe_load((run.folder / "config.resolved.yaml").read_text())
    manifest = json.loads((run.folder / "manifest.json").read_text())
    model = str(tmp_path / "tiny" / "model")
    assert config["model"]["path"] == manifest["model"] == manifest["models"]["model.path"]["folder"] == model
    assert (run.folder / "report.html").exists()

    newest = Checkpoints(run.folder / "checkpoints").latest().name
    [line] = [line for line in run.output.splitlines() if line.startswith("The run ended. ")]
    assert line.startswith(f"The run ended. Resume it from {newest} with: megarl train ")
    arguments = shlex.split(line.partition("megarl ")[2])
    step = int(newest.removeprefix("step_"))
    command = [sys.executable, "-m", "megarl.cli", *arguments, f"run.steps={step + 1}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {step} from " in done.stdout
