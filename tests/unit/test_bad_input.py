"""Tests that user errors are reported in one line each before anything starts, without leaving files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl.cluster.supervision import supervisor
from megarl.run import preflight
from tests.command_line import run_command
from tests.e2e.run import write_recipe
from tests.marks import every_third
from tests.tiny_model import write_tiny_llama

GOOD_ROW = '{"prompt": "1 + 1 =", "answer": "2"}'
DATA = {
    "malformed": [GOOD_ROW, '{"prompt": 5, "answer": "2"}'],
    "incomplete": [GOOD_ROW, '{"prompt": "1 + 1 ="}'],
    "long": [GOOD_ROW, json.dumps({"prompt": 60 * "1", "answer": "2"})],
    "torn": [GOOD_ROW, '{"prompt": "1 + 1 ='],
    "list": ["[1, 2]"],
    "blank": [""],
    "latin": [],
}
REWARDS = {
    "good": "def f(prompt, response, answer):\n    return 1\n",
    "syntax": "def f(:\n",
    "missing_import": "import no_such_module\n",
    "leaves": "import sys\nsys.exit(3)\n",
    "crashes": "import os\nos._exit(3)\n",
    "two": "def f(prompt, response):\n    return 1\n",
    "four": "def f(prompt, response, answer, level):\n    return 1\n",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_tiny_llama(folder / "nine_heads", hidden_size=288, num_heads=9, num_kv_heads=3)
    for name, lines in DATA.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "2"}\n')
    (folder / "no.parquet").write_text("no parquet")
    for name, source in REWARDS.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "no_model").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{")
    (folder / "unknown").mkdir()
    (folder / "unknown" / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    (folder / "torn.yaml").write_text("run: {name: a\n")
    (folder / "other_base.yaml").write_text("base: none.yaml\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "empty.yaml").write_text("")
    return write_recipe(folder)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run commands in this process and prevent Ray from starting."""
    monkeypatch.setattr(supervisor, "supervised", lambda *_: nullcontext(tmp_path / "scratch"))
    monkeypatch.setattr("megarl.train.Session", None)


def error_lines(command: str, recipe: Path, root: Path, overrides: str, capfd: pytest.CaptureFixture) -> list[str]:
    """Run a command that fails with a user error. Return the lines of stderr, with FOLDER for the recipe's folder and
    RUNS for run.folder."""
    folder = str(recipe.parent)
    arguments = overrides.replace("FOLDER", folder).split("  ")
    file = arguments.pop(0) if arguments[0].endswith(".yaml") else str(recipe)
    code = run_command(command, file, f"run.folder={root}", *filter(None, arguments))
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    return err.replace(folder, "FOLDER").replace(str(root), "RUNS").splitlines()


def rewards(name: str) -> str:
    return f"rewards.functions=[{{function: '{name}'}}]"


CASES = [
    # keys
    ("run.stps=1", ["command line: run.stps: unknown key; did you mean run.steps?"]),
    ("actor.layout.tpp=1", ["command line: actor.layout.tpp: unknown key"]),
    ("no_such=1", ["command line: no_such: unknown key"]),
    ("steps", ["command line: 'steps': expected KEY=VALUE. Fix: write it in this form, such as run.steps=3"]),
    # values
    ("run.steps=many", ["command line: run.steps=many: expected an integer, found text"]),
    ("run.steps=-1", ["command line: run.steps=-1: expected"]),
    ("actor.optimizer.lr=-1e-6", ["command line: actor.optimizer.lr=-1.0e-06: expected more than 0"]),
    ("model.dtype=float8", ["command line: model.dtype=float8: expected"]),
    ("algorithm.advantage.estimator=grop", ["command line: algorithm.advantage.estimator=grop: expected"]),
    ("batch.prompts_per_update=3", ["batch.prompts_per_update=3: 4 prompts per step are not divisible by 3"]),
    (
        "rollout.max_new_tokens=64",
        ["rollout.max_new_tokens=64: 64 - 64 = 0 of rollout.context_length=64 tokens are left for the"],
    ),
    ("rewards.functions=[]", ["rewards.functions=[]: samples would have no reward. Fix: add a function such as"]),
    (
        "rewards.functions=[{funktion: exact_match}]",
        [
            "command line: rewards.functions.0.funktion: unknown key; did you mean rewards.functions.function?",
            "command line: missing key rewards.functions.0.function. Fix: set every required key of the list entry",
        ],
    ),
    ("rewards.failure_limit=2", ["command line: rewards.failure_limit=2: expected at most 1"]),
    # recipe files
    ("FOLDER/none.yaml", ["FOLDER/none.yaml: cannot be read"]),
    ("FOLDER/torn.yaml", ["FOLDER/torn.yaml"]),
    ("FOLDER/other_base.yaml", ["FOLDER/none.yaml (the base of FOLDER/other_base.yaml): cannot be read"]),
    ("FOLDER/list.yaml", ["FOLDER/list.yaml"]),
    ("FOLDER/empty.yaml", ["FOLDER/empty.yaml"]),
    # models
    ("model.path=FOLDER/none", ["model.path=FOLDER/none: does not exist. Fix: use a Hugging Face folder"]),
    (
        "model.path=FOLDER/no_model",
        ["model.path=FOLDER/no_model: has no config.json. Fix: use the folder that contains"],
    ),
    ("model.path=FOLDER/damaged", ["FOLDER/damaged/config.json: invalid JSON"]),
    ("model.path=FOLDER/unknown", ["model.path=FOLDER/unknown: model_type mamba is not supported. Fix: use"]),
    (
        "model.path=package:no-such-package",
        ["model.path=package:no-such-package: the Python distribution 'no-such-package' is not installed"],
    ),
    (
        "model.path=FOLDER/nine_heads  actor.layout.pp=1  actor.layout.tp=2",
        [
            "actor.layout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set actor.layout.tp to 1",
            "actor.layout.tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set actor.layout.tp to 1",
        ],
    ),
    (
        "actor.layout.pp=3",
        ["actor.layout.pp=3: 2 layers cannot be split evenly over the stages: 2 layers over 3 stages"],
    ),
    (
        "actor.layout.dp=32",
        ["actor.layout.dp=32: an update has only 16 samples (4 prompts x 4 samples), but each"],
    ),
    (
        "actor.frozen=[no.such.tensor]",
        ["actor.frozen: no.such.tensor matches no tensor in the model. Fix: use a name such as"],
    ),
    (
        "rollout.context_length=512  actor.tokens_per_microbatch=512",
        ["rollout.context_length=512: the model has 256 positions (max_position_embeddings). Fix: set"],
    ),
    (
        "rollout.context_length=512",
        ["actor.tokens_per_microbatch=256: a sample can have up to rollout.context_length=512 tokens and is"],
    ),
    (
        "reward_model.path=FOLDER/model",
        ["reward_model.path=FOLDER/model: its architecture is LlamaForCausalLM, which has no score head"],
    ),
    # data
    ("data.source=FOLDER/none.jsonl", ["data.source=FOLDER/none.jsonl: not a file. Fix: correct"]),
    ("data.more_sources=[FOLDER/none.jsonl]", ["data.more_sources=FOLDER/none.jsonl: not a file. Fix: correct"]),
    (
        "data.source=FOLDER/good.py",
        ["data.source=FOLDER/good.py: unknown data source. Fix: use arithmetic, reasoning_gym:TASK,"],
    ),
    ("data.source=FOLDER/no.parquet", ["FOLDER/no.parquet: not a Parquet file"]),
    (
        "data.source=FOLDER/malformed.jsonl",
        ["FOLDER/malformed.jsonl:2: column 'prompt': expected text or a list of {role, content} messages"],
    ),
    ("data.source=FOLDER/incomplete.jsonl", ["FOLDER/incomplete.jsonl:2: missing column 'answer'"]),
    ("data.source=FOLDER/long.jsonl", ["FOLDER/long.jsonl:2: the prompt has 63 tokens (63 + "]),
    ("data.source=FOLDER/torn.jsonl", ["FOLDER/torn.jsonl:2: invalid JSON"]),
    ("data.source=FOLDER/latin.jsonl", ["FOLDER/latin.jsonl:1: invalid JSON"]),
    ("data.source=FOLDER/list.jsonl", ["FOLDER/list.jsonl:1: expected one JSON object per line, found list"]),
    (
        "data.source=FOLDER/blank.jsonl",
        ["data.source=FOLDER/blank.jsonl: the source has no rows. Fix: use a file with at least one"],
    ),
    ("data.size=9", ["data.size=9: FOLDER/prompts.jsonl has only 8 rows. Fix: set data.size to at most 8"]),
    ("data.prompt_column=question", ["FOLDER/prompts.jsonl:1: missing column 'question'"]),
    # rewards
    (rewards("exact_mach"), ["rewards.functions: unknown function 'exact_mach'. Fix: use exact_match"]),
    (rewards("FOLDER/none.py:f"), ["rewards.functions: FOLDER/none.py is not a Python file. Fix: correct"]),
    (rewards("FOLDER/good.py"), ["rewards.functions: FOLDER/good.py names a file but no function"]),
    (
        rewards("FOLDER/good.py:g"),
        ["rewards.functions: FOLDER/good.py has no function 'g'. Fix: define it as g(prompt, "],
    ),
    (rewards("FOLDER/syntax.py:f"), ["rewards.functions: importing FOLDER/syntax.py raised SyntaxError"]),
    (
        rewards("FOLDER/missing_import.py:f"),
        ["rewards.functions: importing FOLDER/missing_import.py raised ModuleNotF"],
    ),
    (rewards("FOLDER/leaves.py:f"), ["rewards.functions: FOLDER/leaves.py:f: the import ended the process"]),
    (
        rewards("FOLDER/crashes.py:f"),
        ["rewards.functions: FOLDER/crashes.py:f: the import ended the process (exit st"],
    ),
    (
        rewards("FOLDER/two.py:f"),
        ["rewards.functions: FOLDER/two.py:f has the signature (prompt, response): too many positional"],
    ),
    (
        rewards("FOLDER/four.py:f"),
        ["FOLDER/prompts.jsonl:1: missing column 'level' (expected: a JSON value (text, number, true/false, null,"],
    ),
    (
        f"{rewards('FOLDER/four.py:f')}  data.source=arithmetic",
        ["data.source=arithmetic: missing column 'level', which f requires. Fix: use a file"],
    ),
    (
        "rewards.functions=[{function: exact_match}, {function: exact_match}]",
        ["rewards.functions: exact_match is listed twice. Fix: list it once, with the sum of the weights"],
    ),
    (
        "rewards.judge=FOLDER/good.py:f",
        ["rewards.judge: FOLDER/good.py:f has the signature (prompt, response, answer): too many p"],
    ),
    # folders and checkpoints
    ("run.folder=FOLDER/good.py/runs", ["run.folder=FOLDER/good.py/runs: not writable (Not a directory"]),
    ("run.folder=/proc/runs", ["run.folder=/proc/runs: not writable"]),
    (
        "run.name=latest",
        ["run.name=latest: the name latest is reserved for the link to the newest run. Fix: set a different run.name"],
    ),
    (
        "resume=FOLDER/none",
        ["resume=FOLDER/none: no such folder. Fix: set resume to never, auto or a checkpoint folder"],
    ),
    ("resume=FOLDER/no_model", ["FOLDER/no_model: manifest.json is missing"]),
    ("checkpoint.every_steps=1  checkpoint.keep=100000000", ["checkpoint.keep=100000000: RUNS/tiny/checkpoints has "]),
    # several at once
    (
        f"{rewards('FOLDER/good.py:g')}  data.source=FOLDER/torn.jsonl  run.folder=/proc/runs",
        [
            "run.folder=/proc/runs: not writable",
            "rewards.functions: FOLDER/good.py has",
            "FOLDER/torn.jsonl:2: invalid JSON",
        ],
    ),
]


@pytest.mark.parametrize("case", every_third(CASES), ids=[overrides[:60] for overrides, _ in CASES])
def test_user_error_is_reported_before_anything_starts(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    case: tuple[str, list[str]],
) -> None:
    overrides, lines = case
    if "rewards." not in overrides:  # the other checks do not need the process of the reward functions
        monkeypatch.setattr(preflight, "_function_pool", lambda config: None)
    errors = error_lines("train", recipe, tmp_path / "runs", overrides, capfd)
    for line, start in zip(errors, lines, strict=True):
        assert line.startswith(f"megarl: error: {start}") and "Fix: " in line
    assert not list(tmp_path.iterdir()), "the command left files"
