"""The recipes of the tutorials train for two steps, unchanged except for size, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import metrics_of
from tests.metrics import undeclared
from tests.timing import RUN_S
from tests.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tiny_llama
from tests.unit.docs.test_tutorials import write_files

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
TINY = (
    *("run.steps=2", "run.export=false", "model.dtype=float32", "actor.layout={pp: 1}", "cluster.object_store_mib=80"),
    *("actor.layout.last_stage_layers=null", "rollout.kv_cache_gib=0.02"),
    *("batch.prompts_per_step=4", "batch.samples_per_prompt=2", "batch.prompts_per_update=4"),
)
METRICS = {
    "own-reward": "reward/reward",
    "tools-and-turns": "environment/tool_calls",
    "agents": "environment/turns_mean",
    "lora": "policy/grad_norm",
    "asynchronous": "weights/staleness_1_share",
}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory) -> Path:
    """Return a model whose context has room for tool descriptions, and whose tokens all decode to text."""
    vocab_size = len(SPECIAL_TOKENS) + len(CHARACTERS)
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=vocab_size, max_positions=2048)


@pytest.mark.parametrize("name", METRICS)
def test_recipe_of_the_tutorial_trains(name, long_model, tmp_path):
    write_files(f"docs/tutorials/{name}.md", tmp_path)
    command = [sys.executable, "-m", "megarl.cli", "train", "recipe.yaml", f"model.path={long_model}", *TINY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    [run] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink() and path.name[0] != "."]
    steps = metrics_of(run)
    assert len(steps) == 2 and METRICS[name] in steps[1]
    assert undeclared(run / "metrics.jsonl") == []
