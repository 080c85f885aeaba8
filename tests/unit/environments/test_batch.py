"""Batch reward functions in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.environments.batch import judge_batch
from megarl.environments.trial import try_rewards
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from tests.paths import QUICKSTART
from tests.timing import HANG_S, LIMIT_S, WAIT_S

FUNCTIONS = """
import asyncio, time

def rarity(prompts, responses, answers):
    return [1 / list(zip(prompts, responses)).count(pair) for pair in zip(prompts, responses)]

async def columns(prompts, responses, answers, level, missing=7, *, row):
    await asyncio.sleep(0.01)
    assert missing == 7 and [item.get("level") for item in row] == level
    return [[answer, len(level), (each or 0) * 10] for answer, each in zip(answers, level)]

def act(prompts, responses, answers):
    return eval(responses[0])
"""
NAMES = ("rarity", "columns", "act")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "batches.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def pool(file) -> Iterator[FunctionPool]:
    functions = ["exact_match", *(f"{file}:{name}" for name in NAMES)]
    pool = FunctionPool(functions, None, 2, WAIT_S)
    yield pool
    pool.close()


def sample(name: str, prompt: Prompt, text: str) -> Sample:
    return Sample(name, prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", text)


def act(pool: FunctionPool, file: Path, code: str) -> list[Result]:
    """Call a batch function that evaluates the code, with two samples."""
    return pool.call_batch(f"{file}:act", [Prompt("p", "", [1])] * 2, [code, ""]).result()


def test_batch_function_receives_all_samples_of_each_group(pool, file):
    assert pool.batch_functions == [f"{file}:{name}" for name in NAMES]
    prompts = [Prompt("0", "a", [1], 5, columns={"level": 3}), Prompt("1", "b", [2], 6)]
    texts = {"0.0": "[1, None, float('nan'), True]", "0.1": "a", "1.0": "a", "1.1": "a"}
    samples = [sample(name, prompts[int(name[0])], text) for name, text in texts.items()]
    found = asyncio.run(judge_batch(pool, samples))
    by_function = [[results[f"{file}:{name}"] for results in found] for name in NAMES]
    assert [result.value for result in by_function[0]] == [1.0, 1.0, 0.5, 0.5]
    assert [result.value for result in by_function[1]] == [[5, 4, 30], [5, 4, 30], [6, 4, 0], [6, 4, 0]]
    assert [result.returned for result in by_function[2]] == ["1.0", "NoneType", "nan", "1.0"]
    assert all(result.failure is None for results in by_function for result in results)


def test_batch_function_may_return_an_array(pool, file):
    assert [result.value for result in act(pool, file, "__import__('numpy').array([0.5, 2.0])")] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("[1.0]", "returned a list of 1 for 2 samples, not one score for each,"),
        ("0.5", "returned float for 2 samples, not one score for each,"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("exit(3)", "raised SystemExit: 3"),
        ("__import__('os')._exit(3)", "terminated its process (exit status 3)"),
    ],
)
def test_failing_batch_call_fails_all_samples(pool, file, code, failure):
    assert act(pool, file, code) == [Result(None, failure=failure)] * 2
    assert [result.value for result in act(pool, file, "[1, 2]")] == [1.0, 2.0]


def test_hanging_batch_call_fails_all_samples(file):
    with closing(FunctionPool([f"{file}:act"], None, 1, LIMIT_S)) as pool:
        failure = f"did not return within rewards.timeout_s={LIMIT_S}"
        assert act(pool, file, f"time.sleep({HANG_S})") == [Result(None, failure=failure)] * 2
        assert [result.value for result in act(pool, file, "[1, 2]")] == [1.0, 2.0]


def test_trial_scores_a_batch_of_one(pool, file):
    functions = f"rewards.functions=[{{function: exact_match, weight: 2.0}}, {{function: '{file}:rarity'}}]"
    config = load(QUICKSTART, [functions])
    single = FunctionPool(config.rewards.functions, None, 1, WAIT_S)
    try:
        trial = try_rewards(config, single, [Prompt("0", "a", [1], "5")])
    finally:
        single.close()
    assert trial == {"exact_match": 1.0, "rarity": 1.0}
