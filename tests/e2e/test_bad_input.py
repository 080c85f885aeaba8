"""What a user gets wrong is told in one line that names it, and where it can be known early, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.run import ROOT, Run, write_recipe
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow
GOOD_ROW = {"prompt": "1 + 1 =", "answer": "2"}
BAD_ROWS = {
    "malformed": {"prompt": 5, "answer": "2"},
    "incomplete": {"prompt": "1 + 1 ="},
    "long": {"prompt": 60 * "1", "answer": "2"},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_tiny_llama(folder / "nine_heads", hidden_size=288, num_heads=9, num_kv_heads=3)
    for name, row in BAD_ROWS.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(GOOD_ROW)}\n{json.dumps(row)}\n")
    return write_recipe(folder)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ("run.stps=1", ["command line: run.stps: unknown key; did you mean run.steps?"]),
        ("model.path=FOLDER/none", ["model.path: FOLDER/none does not exist; give a Hugging Face folder"]),
        (
            "model.path=FOLDER/nine_heads actor.layout.pp=1 actor.layout.tp=2",
            [
                "actor.layout.tp=2: 9 attention heads do not divide by 2 (9 / 2 = 4.5); choose from 1",
                "actor.layout.tp=2: 3 KV heads do not divide by 2 (3 / 2 = 1.5); choose from 1",
            ],
        ),
        ("actor.layout.pp=3", ["actor.layout.pp=3: 2 layers do not tile the stages: 2 layers over 3 stages"]),
        ("actor.layout.dp=32", ["actor.layout.dp=32: an update has 16 samples (4 prompts x 4 samples), fewer than"]),
        (
            "data.source=FOLDER/malformed.jsonl",
            ["FOLDER/malformed.jsonl:2: column 'prompt' holds int 5, expected"],
        ),
        ("data.source=FOLDER/incomplete.jsonl", ["FOLDER/incomplete.jsonl:2: no column 'answer'"]),
        ("data.source=FOLDER/long.jsonl", ["FOLDER/long.jsonl:2: the prompt has 63 tokens, and 63 + "]),
    ],
)
def test_is_refused_before_anything_starts(recipe: Path, tmp_path: Path, overrides: str, lines: list[str]) -> None:
    folder = str(recipe.parent)
    arguments = [str(recipe), f"run.folder={tmp_path}", *overrides.replace("FOLDER", folder).split()]
    command = [sys.executable, "-m", "megarl.cli", "train", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    for line, start in zip(done.stderr.splitlines(), lines, strict=True):
        assert line.startswith(f"megarl: error: {start.replace('FOLDER', folder)}")
    # It is made before any process is started.
    assert not list(tmp_path.iterdir()), "the run has got a folder"


def test_reward_function_that_raises(recipe: Path, tmp_path: Path) -> None:
    function = f"{recipe.parent}/reward.py:broken"
    with Run(recipe, tmp_path, f"rewards.functions=[{{function: '{function}'}}]") as run:
        assert run.end(120) == 2
        assert run.errors == [
            f"megarl: error: rewards.functions: {function} raised KeyError: 'no such key' on sample 1.0.0 "
            "(16 of 16 samples failed; rewards.failure_limit=0 allows 0)"
        ]
