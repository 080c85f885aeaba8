"""Options of reward functions, and the sources of rows that they apply to."""

from __future__ import annotations

import re

import pytest

from megarl.config.load import load
from megarl.config.schema import RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.prompts import load_prompts
from megarl.environments.trial import try_rewards
from megarl.rewards.pool import FunctionPool
from megarl.rewards.registry import column_parameters, resolve
from megarl.rewards.scorer import Scorer
from tests.paths import QUICKSTART
from tests.tiny_model import tiny_tokenizer

FUNCTIONS = """
def near(prompt, response, answer, level, tolerance=0.1):
    return abs(float(response) - float(answer)) <= tolerance * level

def anything(prompt, response, answer, **named):
    return named["scale"]

def batch(prompts, responses, answers, *, scale=1.0):
    return [scale * len(response) for response in responses]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("functions") / "options.py"
    file.write_text(FUNCTIONS)
    return str(file)


def test_options_are_arguments_and_not_columns(file):
    near = resolve(f"{file}:near", {"tolerance": 2})
    assert near("", "1", "3", level=1) and not near("", "1", "3", level=0.5)
    assert column_parameters(near, 3) == {"level": True}
    assert column_parameters(resolve(f"{file}:near"), 3) == {"level": True, "tolerance": False}
    assert column_parameters(resolve(f"{file}:near", {"level": 1, "tolerance": 1}), 3) == {}
    assert resolve(f"{file}:anything", {"scale": 3})("", "", None) == 3
    assert resolve("think_answer_format", {"right": 1, "wrong": -1})("", "no", None) == -1
    assert column_parameters(resolve("think_answer_format"), 3) == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_match", {"case": 1}, "exact_match has no option 'case'. Fix: remove its options"),
        (
            "think_answer_format",
            {"rihgt": 1},
            "has no option 'rihgt'. Fix: use one of its options: right, wrong",
        ),
        ("think_answer_format", {"response": 1}, "has no option 'response'. Fix: use one of its options: right, wrong"),
        ("FILE:near", {"scale": 1}, "FILE:near has no option 'scale'. Fix: use one of its options: level, tolerance"),
        ("regex_match", {}, "regex_match requires the option pattern. Fix: add options: {pattern: …}"),
        (
            "regex_match",
            {"pattern": "("},
            "regex_match: options.pattern='(': not a valid regular expression: missing )",
        ),
        (
            "regex_match",
            {"patern": "a"},
            "'patern'. Fix: use one of its options: pattern, whole, ignore_case, timeout",
        ),
        ("math_match", {"timeout_s": 0.5}, "math_match: options.timeout_s=0.5: must be a positive integer"),
        (
            "soft_overlong",
            {"max_tokens": 8, "buffer": 9},
            "options.buffer=9: not allowed. Fix: use a positive integer up to max_tokens=8",
        ),
        ("cosine_length", {"max_tokens": 0}, "cosine_length: options.max_tokens=0: must be a positive integer"),
        ("cosine_length", {"max_tokens": 8, "verifier": "exact"}, "unknown function 'exact'. Fix: use exact_match"),
        (
            "cosine_length",
            {"max_tokens": 8, "verifier": {"name": "f"}},
            "expected a function's name or {function, options}",
        ),
        (
            "generative_judge",
            {"base_url": "localhost", "model": "m"},
            "options.base_url=localhost: not a URL. Fix: ",
        ),
        (
            "generative_judge",
            {"base_url": "http://localhost/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"},
            "options.api_key_env=NO_SUCH_KEY: this environment variable is not set. Fix: set it to the API key",
        ),
        (
            "reasoning_gym",
            {"reads": "box"},
            "reasoning_gym: options.reads='box': unknown value. Fix: use one of tags, response",
        ),
    ],
)
def test_invalid_option_is_refused(file, name, options, message):
    with pytest.raises(UserError, match=f"^rewards.functions: .*{re.escape(message.replace('FILE', file))}"):
        resolve(name.replace("FILE", file), options)


def test_pool_refuses_invalid_options():
    with pytest.raises(UserError, match=r"^rewards.functions: .*exact_match has no option 'case'\. Fix: remove"):
        FunctionPool([RewardFunction(function="exact_match", options={"case": 1})], None, 1, 5.0)


def entries() -> str:
    return (
        "rewards.functions=["
        "{function: regex_match, name: tags, options: {pattern: '<b>'}, weight: 0.5},"
        "{function: regex_match, name: number, options: {pattern: '(?<answer>\\d+)'}, sources: [math, add]},"
        "{function: exact_match, sources: [text]}]"
    )


def test_functions_apply_to_rows_of_their_sources(tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = ['{"prompt": "a", "answer": "7", "from": "math"}', '{"prompt": "b", "answer": "word", "from": "text"}']
    data.write_text("\n".join(rows) + "\n")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    overrides = [entries(), "data.source_column=from", f"data.source={data}", "data.size=null"]
    config = load(QUICKSTART, overrides)
    pool = FunctionPool(config.rewards.functions, None, 1, 5.0, source_column="from")
    try:
        prompts = load_prompts(config, tmp_path / "model", pool.columns).prompts
        trials = [try_rewards(config, pool, rows) for rows in ([prompts[0]], [prompts[1]], prompts)]
    finally:
        pool.close()
    assert [prompt.columns for prompt in prompts] == [{"from": "math"}, {"from": "text"}]
    assert trials == [
        {"tags": 0.0, "number": 1.0},
        {"tags": 0.0, "exact_match": 1.0},
        {"tags": 0.0, "number": 1.0, "exact_match": 1.0},
    ]
    only_math = "rewards.functions=[{function: exact_match, sources: [math]}]"
    with pytest.raises(
        UserError, match=r"rows.jsonl:2: no function in rewards.functions lists 'text' \(the row's 'from'\) in its"
    ):
        load_prompts(load(QUICKSTART, [only_math, *overrides[1:]]), tmp_path / "model")
    with pytest.raises(UserError, match=r"sources=.*, because data\.source_column=null"):
        load(QUICKSTART, [only_math])
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: missing column 'origin' .* Fix: set data.source_column to one of the columns"
    ):
        load_prompts(load(QUICKSTART, [*overrides, "data.source_column=origin"]), tmp_path / "model")


def test_batch_contains_only_samples_of_its_sources(file):
    import asyncio

    from megarl.environments.batch import judge_batch

    entry = RewardFunction(function=f"{file}:batch", name="long", options={"scale": 2}, sources=["b"])
    prompts = [Prompt(str(i), "", [1], columns={"s": source}) for i, source in enumerate("abab")]
    samples = [
        Sample(prompt.id, prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", "x" * i)
        for i, prompt in enumerate(prompts)
    ]
    pool = FunctionPool([entry], None, 1, 5.0, source_column="s")
    try:
        results = asyncio.run(judge_batch(pool, samples))
    finally:
        pool.close()
    assert [{name: result.value for name, result in one.items()} for one in results] == [
        {},
        {"long": 2.0},
        {},
        {"long": 6.0},
    ]


@pytest.mark.parametrize(
    ("second", "remedy"),
    [
        ({"function": "exact_match", "weight": 2.0}, "list it once, with the sum of the weights"),
        ({"function": "exact_match", "sources": ["a"]}, "set a different `name` in each entry"),
        ({"function": "numeric_match", "name": "exact_match"}, "set a different `name` in each entry"),
    ],
)
def test_functions_with_the_same_name_are_refused(second, remedy):
    with pytest.raises(UserError, match=f"^rewards.functions: exact_match is listed twice. Fix: {remedy}$"):
        Scorer([RewardFunction(function="exact_match"), RewardFunction(**second)])


@pytest.mark.parametrize(
    "name", ["mean", "environment", "environment_moves", "baseline", "a_unrated_frac", "a_truncated_frac", "judge"]
)
def test_name_of_another_metric_is_refused(name: str):
    problem = f"the name {name} is reserved for one of megarl's metrics. Fix: add `name: OTHER` to the entry"
    with pytest.raises(ValueError, match=f"rewards.functions: exact_match: {problem}"):
        load(QUICKSTART, [f"rewards.functions=[{{function: exact_match, name: {name}}}]"])
    with pytest.raises(ValueError, match=f"rewards.functions: .*/score.py:{name}: {problem}"):
        load(QUICKSTART, [f"rewards.functions=[{{function: 'score.py:{name}'}}]"])


@pytest.mark.parametrize("name", ["environments", "mean_score", "judged", "unrated_frac", "environment-a"])
def test_similar_names_are_allowed(name: str):
    [entry] = load(QUICKSTART, [f"rewards.functions=[{{function: exact_match, name: {name}}}]"]).rewards.functions
    assert entry.label == name
