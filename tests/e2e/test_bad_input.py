"""Errors in user input give one line that names the cause, before any process starts if they can be found that early.

tests/unit/test_bad_input.py has the individual cases.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.run import ROOT, Run, write_recipe
from tests.timing import START_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def test_missing_reward_function_fails_before_start(recipe: Path, tmp_path: Path) -> None:
    reward = f"{recipe.parent}/reward.py"
    overrides = [f"run.folder={tmp_path}", f"rewards.functions=[{{function: '{reward}:digit_shar'}}]"]
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    definition = "define it as digit_shar(prompt, response, answer)"
    assert (
        done.stderr == f"megarl: error: rewards.functions: {reward} has no function 'digit_shar'. Fix: {definition}\n"
    )
    # A run creates its folder before it starts processes.
    assert not list(tmp_path.iterdir()), "the run created its folder"


@pytest.mark.exhaustive
def test_reward_function_that_raises_is_named(recipe: Path, tmp_path: Path) -> None:
    function = f"{recipe.parent}/reward.py:broken"
    keys = ["actor.layout.pp=1", f"rewards.functions=[{{function: '{function}'}}]"]
    with Run(recipe, tmp_path, *keys, megatron=False) as run:
        assert run.end(START_S) == 2
        assert run.errors == [
            "megarl: error: rewards.functions: broken raised KeyError: 'no such key' on sample 1.0.0 "
            "(16 of 16 samples failed, but rewards.failure_limit=0 allows only 0). Fix: correct the reward function, "
            "or raise rewards.failure_limit",
        ]


@pytest.mark.exhaustive
def test_rejected_engine_argument_ends_the_run(recipe: Path, tmp_path: Path) -> None:
    """No CPU kernel has this block size. vLLM rejects it only after it has loaded the model."""
    with Run(recipe, tmp_path, "actor.layout.pp=1", "rollout.vllm_overrides={block_size: 7}", vllm=True) as run:
        assert run.end(START_S) == 2
        [line] = run.errors
    assert line.startswith("megarl: error: rollout.vllm_overrides={'block_size': 7}: vLLM rejects the engine's arg")
    assert "block size for 7" in line and line.endswith(". Fix: change or remove the rejected argument")
