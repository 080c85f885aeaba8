"""Run every command that megarl's messages print. Each one reaches the checks of its own subcommand."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl import cli
from megarl.api import convert
from megarl.cluster.supervision import supervisor
from megarl.config.load import dump, load
from megarl.report import resume_hint
from megarl.run.folder import RunFolder
from tests.command_line import run_command
from tests.e2e.run import write_recipe
from tests.paths import ROOT
from tests.published_models import CONFIGS

NAMES = [command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback]
NAMES += [group.name for group in cli.app.registered_groups]
PRINTED = re.compile(rf"\bmegarl (?:{'|'.join(map(str, NAMES))})\b[^`'\",.;:()\n]*")

MENTIONS = (
    "megarl check and exit without training",
    "megarl train exited with status {status}",
    "megarl train runs here",
    "megarl diagnose does not support",
    "megarl evaluate runs on a single machine",
    "megarl node",
    "megarl launch",
    "megarl plan",
    "megarl join only on the other nodes",
    "megarl join received a signal on this node",
)
"""Statements about a command, and command names in the help."""

COMMANDS = {
    "megarl algorithms": ("algorithms", 0, "grpo"),
    "megarl algorithms {spec": ("algorithms grpo", 0, "grpo"),
    "megarl check {command}": ("check RECIPE", 0, "All checks passed."),
    "megarl train {command}": ("train RECIPE --dry-run", 0, "All checks passed."),
    "megarl train {shlex": ("train RECIPE --dry-run", 0, "All checks passed."),
    "megarl train with cluster": ("config show RECIPE cluster.nodes=2 cluster.interface=lo", 0, "nodes: 2"),
    "megarl doctor": ("doctor", 0, ""),
    "megarl doctor for details": ("doctor", 0, ""),
    "megarl doctor to check the installed packages": ("doctor", 0, ""),
    "megarl doctor that this version of vLLM is supported": ("doctor", 0, "vllm"),
    "megarl join {folder} on each missing node": ("join FOLDER --wait 0.1", 2, "no multi-node run started"),
    "megarl join {folder} on another node": ("join FOLDER --wait 0.1", 2, "no multi-node run started"),
    "megarl join on a node with at least {invitation": ("join FOLDER --wait 0.1", 2, "no multi-node run started"),
    "megarl evaluate MODEL RECIPE": ("evaluate MODEL RECIPE", 2, "evaluation.sets=[]"),
    "megarl plan RECIPE --gpus GPUS": ("plan RECIPE --gpus 8xH100-80GB PLANNED", 0, "async"),
    "megarl plan {recipe} --gpus {gpus}": ("plan RECIPE --gpus 8xH100-80GB PLANNED", 0, "async"),
    "megarl launch RECIPE --nodes N --time TIME": (
        "launch RECIPE --nodes 1 --time 1:00:00 --gpus-per-node 0 --dry-run",
        2,
        "exists only on this machine",
    ),
    "megarl convert megatron-to-hf --checkpoint {path} --out FOLDER": (
        "convert megatron-to-hf --checkpoint MODEL --out FOLDER",
        2,
        "",
    ),
    "megarl convert adapters-to-hf": ("convert adapters-to-hf --checkpoint MODEL --out FOLDER", 2, ""),
    "megarl diagnose {_folder": ("diagnose RUN", 2, "the run has no rollouts yet"),
    "megarl diagnose on a run with a completed step": ("diagnose RUN", 2, "the run has no rollouts yet"),
}
"""Text of a message up to a punctuation mark -> the command, its exit code, and part of its output."""


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in a file, except docstrings. Values in f-strings appear as their expressions in braces."""
    nodes = [*ast.walk(tree)]
    ignored = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    ignored |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (
                f"{{{ast.unparse(p.value)}}}" if isinstance(p, ast.FormattedValue) else p.value for p in node.values
            )
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            yield node.value


def printed_commands() -> set[str]:
    files = (ROOT / "megarl").rglob("*.py")
    texts = (text for file in files for text in messages(ast.parse(file.read_text(encoding="utf-8"))))
    return {match.strip() for text in texts for match in PRINTED.findall(text)}


def test_every_printed_command_is_in_the_list() -> None:
    assert printed_commands() == {*COMMANDS, *MENTIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its model, a planned model and a run folder without rollouts."""
    folder = tmp_path_factory.mktemp("printed")
    write_recipe(folder)
    (folder / "planned").mkdir()
    (folder / "planned" / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-7B"]))
    (folder / "run").mkdir()
    (folder / "run" / "config.resolved.yaml").write_text(dump(load(folder / "tiny.yaml")))
    return folder


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run commands in this process."""
    monkeypatch.setattr(supervisor, "supervised", lambda *_, **__: nullcontext(tmp_path / "scratch"))
    monkeypatch.setattr(convert, "prepare_process", lambda: None)


def run(command: str, capfd: pytest.CaptureFixture) -> tuple[int, str]:
    code = run_command(*shlex.split(command))
    out, err = capfd.readouterr()
    return code, out + err


@pytest.mark.parametrize(("command", "status", "output"), sorted(set(COMMANDS.values())))
def test_printed_command_runs(
    command: str, status: int, output: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    paths = {
        **{"RECIPE": f"{folder}/tiny.yaml run.folder={tmp_path} run.steps=2", "MODEL": f"{folder}/model"},
        **{"PLANNED": f"model.path={folder}/planned rollout.context_length=1024 actor.tokens_per_microbatch=1024"},
        **{"RUN": f"{folder}/run", "FOLDER": str(tmp_path / "out")},
    }
    if command.startswith("join"):
        (tmp_path / "out").mkdir()
    for name, value in paths.items():
        command = re.sub(rf"\b{name}\b", value, command)
    code, text = run(command, capfd)
    assert code == status and output in text, text
    assert "Usage:" not in text and "Traceback" not in text


@pytest.mark.parametrize("has_step", [False, True])
def test_command_of_the_resume_hint_passes_the_checks(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture, has_step: bool
) -> None:
    config = load(folder / "tiny.yaml", [f"run.folder={tmp_path}", "run.steps=2"])
    run_folder = RunFolder.create(config)
    if has_step:
        run_folder.metrics.write_text('{"step": 1, "reward/mean": 1.0}\n')
    command = resume_hint(run_folder).partition("megarl ")[2]
    assert command.startswith("train ")
    code, text = run(f"{command} --dry-run", capfd)
    assert code == 0 and "All checks passed." in text, text
