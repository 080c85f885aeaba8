"""The code and the recipes of the tutorials: files are written as shown, scripts run, and recipes load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import megarl
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.environments.registry import check_environment
from megarl.rewards.registry import resolve
from tests.forked_script import run_script
from tests.published_models import CONFIGS
from tests.readme import PAGES, text_of

TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]


def write_files(page: str, folder: Path) -> list[str]:
    """Write the page's blocks that begin with a file name. Return the other Python blocks."""
    scripts = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
        if name := re.match(r"# (\w+\.\w+)\n", block):
            (folder / name[1]).write_text(block)
        elif language == "json":
            (folder / "prompts.jsonl").write_text(block)
        elif language == "python":
            scripts.append(block)
    return scripts


def with_recipe() -> list[str]:
    return [page for page in TUTORIALS if "# recipe.yaml" in text_of(page)]


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    write_files(request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    return load(Path("recipe.yaml"))


def test_tutorials_have_recipes():
    assert {Path(page).stem for page in with_recipe()} == {
        "own-reward",
        "tools-and-turns",
        "agents",
        "lora",
        "asynchronous",
        "porting-from-trl",
        "porting-from-verl",
        "python-api",
    }


@pytest.mark.parametrize("page", [page for page in TUTORIALS if "```python" in text_of(page)])
def test_scripts_run(page, tmp_path):
    scripts = write_files(page, tmp_path)
    (tmp_path / "script.py").write_text("\n".join(scripts))
    for file in sorted(tmp_path.glob("*.py")):
        done = run_script(file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_python_api_converts_the_model_of_its_recipe(tmp_path):
    write_files("docs/tutorials/python-api.md", tmp_path)
    text = text_of("docs/tutorials/python-api.md")
    layout = re.search(r"convert_to_megatron\(config.model.path, \"megatron\", (.*)\)", text)[1]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIGS["SmolLM2-135M"]))
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["base"] == "quickstart.yaml"
    plan = megarl.plan_reshard(model, layout.replace(" ", ""), "vllm:replicas=1")
    assert plan.written_once
    with pytest.raises(megarl.UserError, match="attention heads"):
        megarl.plan_reshard(model, "tp=2", "vllm:replicas=1")


@pytest.mark.parametrize("config", with_recipe(), indirect=True)
def test_recipes_load_with_their_functions_and_environments(config):
    for entry in config.rewards.functions:
        assert callable(resolve(entry.function, entry.options))
    if config.environment.name is not None:
        assert check_environment(config.environment.name, config.environment.options)


@pytest.mark.parametrize("config", ["docs/tutorials/own-reward.md"], indirect=True)
def test_reward_of_the_tutorial_scores_its_data(config):
    [entry] = config.rewards.functions
    function = resolve(entry.function, entry.options)
    assert function("What is 1 + 2?", "3", "3", num_response_tokens=1) == 0.99
    assert Path("prompts.jsonl").read_text().count('"prompt"') == config.batch.prompts_per_step


@pytest.mark.parametrize("config", ["docs/tutorials/asynchronous.md"], indirect=True)
def test_asynchronous_recipe_samples_ahead(config):
    assert config.rollout.max_staleness == 1 and config.algorithm.correction.weight == "token"
