"""What the README says can be run. The commands that train are run by tests/e2e/test_quickstart.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from megarl.config.huggingface import FAMILIES
from tests.e2e.learning_cases import CASES
from tests.published_models import CONFIGS
from tests.readme import ROOT, command_blocks, commands
from tests.unit.megatron.checkpoint.test_conversion import assert_same, weights_of, write_model
from tests.unit.resharding.cases import config_of
from tests.unit.test_convert import convert
from tools.benchmarks import figures

MEGARL = [sys.executable, "-m", "megarl.cli"]
CONVERTER = ".venv/bin/python tools/convert.py "
CONVERTING = [command.removeprefix(CONVERTER) for command in commands() if command.startswith(CONVERTER)]
RESHARDING = [command for command in commands() if command.startswith(".venv/bin/megarl reshard")]
LOOKING = [command for command in commands() if re.match(r"\.venv/bin/megarl (config|algorithms)", command)]


def test_every_command_is_run_somewhere():
    trains = [command for command in commands() if command.startswith(".venv/bin/megarl train")]
    assert len(trains) == 1
    converting = {CONVERTER + command for command in CONVERTING}
    assert set(commands()) == {"make quickstart", "make test", *LOOKING, *RESHARDING, *converting, *trains}


def test_the_first_block_is_the_two_commands_and_ci_runs_the_second():
    assert command_blocks()[0] == ["make quickstart", "make test"]
    assert "\nmake test\nmake test-learn\nmake test-exhaustive\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", LOOKING)
def test_commands_that_look_at_a_recipe(command):
    arguments = shlex.split(command)[1:]
    done = subprocess.run([*MEGARL, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_layout_that_does_not_fit_the_model_is_refused_with_the_arithmetic():
    [checks] = [command for command in LOOKING if "actor.layout.dp=64" in command]
    overrides = ["actor.layout.pp=1", "actor.layout.last_stage_layers=null", "actor.layout.tp=2"]
    command = [*MEGARL, *shlex.split(checks)[1:], *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "actor.layout.tp=2: 9 attention heads do not divide by 2" in done.stderr


def test_commands_that_plan(tmp_path):
    """In a folder with a model at the README's path: one with fewer experts, which is planned in less time."""
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    config = CONFIGS["DeepSeek-V3"] | {"n_routed_experts": 32, "moe_intermediate_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    [command] = RESHARDING
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEGARL_CACHE": str(tmp_path / "cache")}
    command = [*MEGARL, *shlex.split(command)[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    labels = [line.split()[0] for line in done.stdout.splitlines()]
    shown = re.search(r"<!-- reshard:begin -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert labels == [line.split()[0] for line in shown.splitlines()]


def test_commands_that_convert(tmp_path, monkeypatch):
    """One after the other, in a folder with a model at the README's path."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    config = config_of(num_key_value_heads=2, num_hidden_layers=4)
    tensors = write_model(tmp_path / "path" / "to" / "model", config)
    monkeypatch.chdir(tmp_path)
    shown = [convert(*shlex.split(command)) for command in CONVERTING]
    assert len(shown) == 4 and all(shown)
    assert_same(weights_of(tmp_path / "converted" / "hf"), tensors)


def test_targets_named_in_the_readme_exist():
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


def test_the_tree_names_what_exists():
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    for line in tree.splitlines():
        name = line.split()[0]
        path = ROOT / ("megarl/" if line.startswith("  ") else "") / name
        assert path.exists(), f"{name} is in the README's tree, but not in the repository"


def test_the_table_of_papers_has_every_recipe_of_one_and_keys_that_exist():
    table = (ROOT / "README.md").read_text().split("## Algorithms")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    recipes = {path.stem for path in (ROOT / "configs").glob("*-*.yaml")} | {"quickstart"}
    assert {recipe.strip().strip("`") for _, recipe in rows} == recipes
    named = re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", " ".join(keys for keys, _ in rows))
    known = "\n".join(flatten(yaml.safe_load((ROOT / "configs" / "base.yaml").read_text()))).splitlines()
    values = {"reinforce"}
    assert [name for name in named if name not in values and not any(f".{k}".endswith(f".{name}") for k in known)] == []


def test_adding_a_family_touches_what_the_readme_names():
    """A dense family's name is in no other file of the package, and every family is in every table of the tests. Llama
    is what these have where they do not say."""
    text = (ROOT / "README.md").read_text().split("## Adding a family")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:megarl|tests)/[a-z_0-9/]+\.py)`", text))
    assert [name for name in named if not (ROOT / name).is_file()] == []
    tables = {name: (ROOT / name).read_text() for name in named if name.startswith("tests/")}
    assert len(tables) == 5
    added = FAMILIES.keys() - {"llama"}
    assert [(name, family) for name, table in tables.items() for family in added if f'"{family}"' not in table] == []
    dense = "|".join(family for family, defaults in FAMILIES.items() if "num_experts_per_tok" not in defaults)
    knowing = [path for path in (ROOT / "megarl").rglob("*.py") if re.search(f'"({dense})"', path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in knowing} <= named


def test_the_figures_are_those_of_the_recorded_results():
    """`python tools/benchmarks/figures.py --write` puts them there."""
    text = (ROOT / "README.md").read_text()
    assert figures.rendered(text) == text


def test_new_results_are_written_into_the_readme(tmp_path, monkeypatch):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    shutil.copytree(figures.RESULTS, results)
    shutil.copy(ROOT / "README.md", readme)
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "README", readme)
    run = {"first": 0.125, "last": 0.75, "steps": 20, "steps_to_optimum": None, "control_last": 0.0}
    (results / "learning.json").write_text(json.dumps({"runs": {"a case": run}}))
    step = json.loads((results / "step_equal.json").read_text()) | {"cpu_percent_elsewhere": 12.3}
    (results / "step_equal.json").write_text(json.dumps(step))
    figures.write()
    rows = re.search(r"<!-- learning:begin -->\n(.*?)\n<!-- learning:end -->", readme.read_text(), re.DOTALL).group(1)
    assert rows.splitlines()[2:] == ["| a case | 0.12 | 0.75 | at most 20 | 0.00 |"]
    busy = "by `python tools/benchmarks/training_step.py`, while other processes had 12 % of the machine's CPU time:"
    assert busy in " ".join(readme.read_text().split())


def test_every_case_that_is_seen_to_learn_has_a_result():
    assert figures.result("learning")["runs"].keys() == CASES.keys()


def test_our_names_in_the_table_of_verl_are_keys_of_the_base_recipe():
    keys = set(flatten(yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())))
    table = (ROOT / "README.md").read_text().split("## Coming from verl")[1].split("\n## ")[0]
    ours = re.findall(r"`((?:actor|algorithm|batch|rollout)\.[a-z_.]+)`", "".join(re.findall(r"\|([^|]*)\|\n", table)))
    assert len(ours) >= 12
    for name in ours:
        assert name in keys or name.startswith("rollout.vllm_overrides."), f"{name} is no key of the base recipe"


def flatten(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
