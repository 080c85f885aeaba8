"""Every reasoning-gym task as data, and its rewards for the entries' reference answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from reasoning_gym.factory import DATASETS

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.data.prompts import load_prompts
from megarl.data.reasoning import Task, _make_rows, decode, encode, reasoning_rows
from megarl.rewards.reasoning import ReasoningGym
from tests.children import Children
from tests.marks import every_third
from tests.paths import BASE, QUICKSTART
from tests.tiny_model import tiny_tokenizer

MANY_SOLUTIONS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose entries have no reference answer."""

COMPOSITE = {"datasets": [{"name": "knights_knaves", "config": {"n_people": 3}}, {"name": "gcd", "weight": 2}]}
SIZE = 2
NONSENSE = ("-77", "zqx nonsense", "[[1]]")
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks that iterate over sets of strings, so that their rows would depend on the hash seed of the process."""


@pytest.fixture(scope="module")
def rows() -> dict[str, list]:
    """Return two rows of every task, generated together."""
    names = sorted(DATASETS)
    stages = [(Task(name, COMPOSITE if name == "composite" else {}), SIZE) for name in names]
    generated = list(reasoning_rows(stages, seed=5))
    return {name: generated[SIZE * i : SIZE * (i + 1)] for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def config_of(source: str, functions: list | None = None, **data) -> Config:
    document = yaml.load(BASE.read_text(), yaml.CSafeLoader)
    document["model"]["path"] = "unused"
    document["rollout"].update(max_new_tokens=16, context_length=8192)
    document["data"].update(source=source, **data)
    document["rewards"]["functions"] = functions or [{"function": "reasoning_gym"}]
    return Config.model_validate(document)


@pytest.mark.parametrize("name", every_third(sorted(DATASETS)))
def test_reference_answer_is_correct_and_nonsense_is_not(rows, name):
    score = ReasoningGym()
    for row in rows[name]:
        json.dumps([row.answer, row.columns], sort_keys=True)  # must be serializable for the data hash
        assert row.prompt and (row.answer is None) == (name in MANY_SOLUTIONS)
        low = max(score(row.prompt, f"<answer>{text}</answer>", row.answer, **row.columns) for text in NONSENSE)
        if row.answer is None:
            assert low <= 0.05
        else:
            correct = score(row.prompt, f"I think\n<answer>{row.answer}</answer>", row.answer, **row.columns)
            assert correct == 1.0 and low < correct


def test_response_without_tags_scores_only_if_read_whole(rows):
    row = rows["gcd"][0]
    score, untagged = ReasoningGym(), ReasoningGym(reads="response")
    assert score("", row.answer, row.answer, **row.columns) == 0.0
    assert untagged("", f" {row.answer}\n", row.answer, **row.columns) == 1.0


def test_error_independent_of_the_response_is_a_failure(rows):
    row = rows["spiral_matrix"][0]
    with pytest.raises(AttributeError):
        ReasoningGym()("", "<answer>1 2</answer>", 7, **row.columns)


@pytest.mark.exhaustive
def test_rows_depend_on_the_seed_only(rows, monkeypatch):
    stages = [(Task(name, {}), SIZE) for name in HASHED]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    first = list(reasoning_rows(stages, seed=5))
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert first == list(reasoning_rows(stages, seed=5))
    stages = [(Task("gcd", {}), SIZE)]
    assert list(_make_rows(stages, seed=5)) != list(_make_rows(stages, seed=6))


def test_killed_row_process_is_replaced(children: Children):
    stages = [(Task("gcd", {}), 5000)]
    expected = list(_make_rows(stages, seed=5))
    rows = reasoning_rows(stages, seed=5)
    received = [next(rows), next(rows)]
    [process] = children()
    process.kill()
    assert [*received, *rows] == expected


def test_repeatedly_killed_row_process_is_not_a_user_error(monkeypatch, children: Children):
    monkeypatch.setattr("megarl.data.reasoning.RESTARTS", 0)
    rows = reasoning_rows([(Task("gcd", {}), 5000)], seed=5)
    next(rows)
    [process] = children()
    process.kill()
    with pytest.raises(InfrastructureFailure, match=r"reasoning-gym process was killed 1 times.* Fix: "):
        list(rows)


def test_rows_keep_the_types_of_their_values():
    """The rows are sent as JSON, which has neither tuples nor integer keys."""
    stages = [(Task(name, {}), SIZE) for name in ("graph_color", "spiral_matrix", "complex_arithmetic")]
    assert list(reasoning_rows(stages, seed=5)) == list(_make_rows(stages, seed=5))
    values = {"a": (1, [2.5, None, True]), 3: {"tuple": [4]}, (5, "b"): (), "nested": [({"dict": "c"},)]}
    received = decode(json.loads(json.dumps(encode(values))))
    assert repr(received) == repr(values)
    assert repr(decode(json.loads(json.dumps(encode(np.int64(7)))))) == "7"


def test_stages_order_knights_and_knaves_by_people(model_folder):
    stages = [{"n_people": people, "size": 3} for people in (3, 4, 5)]
    data = config_of("reasoning_gym:knights_knaves", stages=stages, shuffle=False, source_column="task")
    prompts = load_prompts(data, model_folder, {"options": None}).prompts
    people = [prompt.answer.count(" is a") for prompt in prompts]
    assert people == [3] * 3 + [4] * 3 + [5] * 3
    assert [prompt.columns["options"]["n_people"] for prompt in prompts] == people
    assert {prompt.columns["task"] for prompt in prompts} == {"knights_knaves"}
    assert len({prompt.text for prompt in prompts}) == 9


def test_composite_rows_have_their_task_as_source(model_folder):
    functions = [
        {"function": "knights_knaves", "sources": ["knights_knaves"]},
        {"function": "numeric_match", "sources": ["gcd"]},
    ]
    data = dict(options=COMPOSITE, size=30, source_column="task")
    prompts = load_prompts(config_of("reasoning_gym:composite", functions, **data), model_folder).prompts
    counts = Counter(prompt.columns["task"] for prompt in prompts)
    assert counts.keys() == {"gcd", "knights_knaves"} and counts["gcd"] > counts["knights_knaves"]
    with pytest.raises(
        UserError, match=r"^reasoning_gym:composite:\d+: no function in rewards.functions lists 'gcd' \(the row's"
    ):
        load_prompts(config_of("reasoning_gym:composite", functions[:1], **data), model_folder)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("knight_knaves", {}, "unknown reasoning-gym task 'knight_knaves'. Did you mean knights_knaves"),
        (
            "gcd",
            {"people": 3},
            "data.options.people: unknown option of gcd. Fix: remove it, or use one of min_numbers, max_numbers",
        ),
        ("gcd", {"seed": 3}, "data.options.seed: unknown option of gcd"),
        (
            "knights_knaves",
            {"n_people": 0},
            'data.options={"n_people": 0}: knights_knaves rejects these options: Number of people',
        ),
        ("composite", {}, "composite rejects these options: Must specify at least one dataset"),
    ],
)
def test_unknown_task_or_invalid_option_is_refused(name, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Task(name, options).dataset(seed=0, size=2)


def test_error_in_the_row_process_is_raised_here():
    with pytest.raises(UserError, match=r"data\.options\.people: unknown option of gcd"):
        next(reasoning_rows([(Task("gcd", {"people": 3}), 2)], seed=0))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.options={a: 1}", "data.options={a: 1}: has no effect unless data.source=reasoning_gym:TASK"),
        (
            "data.stages=[{size: 1}] data.source=reasoning_gym:gcd data.shuffle=true data.size=null",
            "set data.shuffle=false",
        ),
        (
            "data.stages=[{size: 1}] data.source=reasoning_gym:gcd data.size=5",
            "data.size=5: each of data.stages has its own size",
        ),
        (
            "data.stages=[{a: 1}] data.source=reasoning_gym:gcd data.shuffle=false data.size=null",
            "has no valid size. Fix: set",
        ),
        ("data.source_column=task", "data.source_column=task: has no effect unless data.source="),
    ],
)
def test_inconsistent_procedural_data_keys_are_refused(override, message):
    parts = [f"data.{part}" for part in override.replace(" data.", "\ndata.").split("\ndata.")]
    with pytest.raises(ValueError, match=re.escape(message)):
        load(QUICKSTART, [part.replace("data.data.", "data.") for part in parts])
