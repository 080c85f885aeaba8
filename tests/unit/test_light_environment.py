"""What looks at recipes and machines works where nothing is installed but the core's own dependencies: an environment
of links to these packages and to those that they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

ABSENT = ("torch", "megatron", "vllm", "ray", "transformers", "pyarrow", "safetensors", "matplotlib")


def closure() -> set[str]:
    """Returns the names of the distributions that pip would install for megarl without extras."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    waiting, found = [(Requirement(line), "") for line in asked], set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) in found:
                continue
            found.add((requirement.name, wanted))
            try:
                needs = distribution(requirement.name).requires or []
            except PackageNotFoundError:  # for another system or Python
                continue
            waiting += [(Requirement(line), wanted) for line in needs]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("site")
    for name in closure():
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    return site


def run(site: Path, *command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{site}:{ROOT}", "HOME": str(site)}
    command = [sys.executable, "-S", *command]  # without the site's packages
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_nothing_else_is_there(site):
    code = f"import importlib.util; print([n for n in {ABSENT} if importlib.util.find_spec(n)])"
    assert run(site, "-c", code).stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("config", "show", "configs/quickstart.yaml"),
        ("config", "explain", "configs/quickstart.yaml", "model.path=MODEL", "actor.layout.last_stage_layers=null"),
        ("algorithms", "rloo"),
        ("reshard", "--model", "MODEL/config.json", "--from", "tp=2,pp=2", "--to", "vllm:tp=2"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_that_look(site, tmp_path, arguments):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, '
        '"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, '
        '"rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": false}'
    )
    done = run(site, "-m", "megarl.cli", *(argument.replace("MODEL", str(tmp_path)) for argument in arguments))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_init_writes_its_recipe(site, tmp_path):
    assert run(site, "-m", "megarl.cli", "init", cwd=tmp_path).returncode == 0
    assert list(tmp_path.glob("*.yaml"))


def test_the_doctor_says_what_is_missing(site, tmp_path):
    done = run(site, "-m", "megarl.cli", "doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "to be changed: torch, megatron-core, vllm, ray, transformers" in done.stdout
