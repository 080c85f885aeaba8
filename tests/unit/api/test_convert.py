"""Tests of the arguments and output of `megarl convert`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import megarl
from megarl.api import commands
from megarl.api.convert import app
from megarl.config.load import load
from megarl.run.checkpoints import Checkpoints
from tests.forked_script import run_script
from tests.paths import BASE, ROOT
from tests.unit.megatron.checkpoint.test_conversion import names_in, write_model
from tests.unit.resharding.cases import config_of

CLI = ROOT / "megarl" / "cli.py"


def convert(*arguments: str | Path) -> str:
    """Run the command in this process without its process setup, and return its output."""
    with patch("megarl.api.convert.prepare_process"):
        return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    write_model(folder / "hf", config_of(num_hidden_layers=4))
    convert("hf-to-megatron", "--hf", folder / "hf", "--out", folder / "checkpoint", "--tp", 3, "--pp", 2, "--vpp", 2)
    return folder


def test_round_trip_preserves_all_tensors(model, tmp_path):
    shown = convert("megatron-to-hf", "--checkpoint", model / "checkpoint", "--out", tmp_path / "back")
    before = {name: t for path in (model / "hf").glob("*.safetensors") for name, t in load_file(path).items()}
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "written" in shown and "verified" in shown and "back: 0.000 GB of tensors" in shown


def test_reshape_without_verification(model, tmp_path):
    arguments = ("--checkpoint", model / "checkpoint", "--out", tmp_path / "new", "--pp", 2, "--first-stage-layers", 1)
    shown = convert("reshape", *arguments, "--no-verify", "--dtype", "float32")
    assert "verified" not in shown
    description = json.loads(convert("inspect", tmp_path / "new", "--json"))
    assert description["model"] == "llama" and len(description["files"]) == 2 and description["companions"] == []
    assert description["tensors"]["decoder.layers.3.mlp.linear_fc1.weight"] == [[36, 12], "float32", 2]


def test_inspect_prints_a_readable_summary(model):
    shown = convert("inspect", model / "checkpoint")
    assert "llama\n" in shown and "GB in 6 files" in shown
    assert "  decoder.layers.0.self_attention.linear_qkv.weight  [24, 12]  bfloat16  in 3\n" in shown


def test_inspect_names_the_initial_model_of_a_run(model, tmp_path):
    config = load(BASE, ["model.path=org/model", "run.name=a", "data.source=arithmetic", "run.steps=1"])
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.begin(1)
    folder = checkpoints.commit(1, {"config": config.model_dump()}, []).path
    shutil.copytree(model / "checkpoint", folder / "actor")
    assert ": actor of a run at step 1, initialized from org/model\n" in convert("inspect", folder)


def test_errors_are_one_line_and_name_options(model, tmp_path):
    arguments = ["--hf", model / "hf", "--out", tmp_path / "out", "--tp", "2"]
    done = run_script(CLI, "convert", "hf-to-megatron", *arguments, cwd=ROOT)
    expected = "megarl: error: --tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set --tp to 1 or 3\n"
    assert (done.returncode, done.stderr) == (2, expected)
    with pytest.raises(ValueError, match=r"^--vpp=2: virtual stages .* but --pp=1 has a single stage"):
        convert("hf-to-megatron", *arguments[:4], "--vpp", 2)
    assert names_in(tmp_path) == set()


def with_command(body: str) -> str:
    """Return a script that adds a command with this body to `megarl convert` and runs it."""
    lines = "\n    ".join(body.splitlines())
    return f"""
import os, signal, sys
from megarl import cli
from megarl.api import convert
@convert.app.command("another")
def another():
    {lines}
sys.argv = ["megarl", "convert", "another"]
cli.main()
"""


def test_sigterm_unwinds_the_command(tmp_path):
    stuck = """
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("tidied up")
"""
    (tmp_path / "stuck.py").write_text(with_command(stuck))
    done = run_script(tmp_path / "stuck.py", cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (143, "tidied up\n", "")


def test_invalid_conversion_does_not_load_the_compiler(tmp_path, monkeypatch, capfd):
    """The command runs in a separate process, because the test process has loaded the compiler. Importing Megatron
    prints nothing."""
    script = """
import atexit, sys
from megarl import cli
atexit.register(lambda: print(*sorted({"torch._dynamo", "torch.distributed.checkpoint"} & sys.modules.keys())))
cli.main()
"""
    monkeypatch.setattr(commands, "MEGARL", (sys.executable, "-c", script))
    with pytest.raises(megarl.UserError, match="Fix: ") as raised:
        megarl.convert_to_megatron(tmp_path / "missing", tmp_path / "out", tp=2)
    printed = f"megarl: error: {raised.value}\ntorch.distributed.checkpoint\n"
    assert capfd.readouterr().out.lstrip("\n") == printed
    assert names_in(tmp_path) == set()
