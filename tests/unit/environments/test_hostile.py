"""Responses and functions that would take a run down cost one sample, in the real processes of the pool."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config.schema import RewardFunction
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.environments import pool as pools
from megarl.environments.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer
from tests.timing import LIMIT_S, WAIT_S

FUNCTIONS = """
import os, time

def loop(prompt, response, answer):
    while True:
        pass

def hog(prompt, response, answer):
    return len(bytearray(int(response)))

def bomb(prompt, response, answer):
    for _ in range(int(response)):
        os.fork()
    time.sleep(60)

def number(prompt, response, answer):
    return float(response)
"""
MEMORY_MIB = 512
CATASTROPHIC = RewardFunction(function="regex_match", name="regex", options={"pattern": "^(a|aa)+$", "timeout_s": 0.5})
MATH = RewardFunction(function="math_match", options={"timeout_s": 1})


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "hostile.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def pool(file) -> Iterator[FunctionPool]:
    own = [RewardFunction(function=f"{file}:{name}", name=name) for name in ("loop", "hog", "bomb", "number")]
    shipped = ["exact_match", "numeric_match", "choice_match", "think_answer_format", "knights_knaves"]
    pool = FunctionPool([*own, *shipped, CATASTROPHIC, MATH], None, 1, LIMIT_S, memory_mib=MEMORY_MIB)
    yield pool
    pool.close()


def call(pool: FunctionPool, function: str, response: str, answer: object = "12") -> Result:
    return pool.call(function, "", response, answer).result()


def assert_works(pool: FunctionPool) -> None:
    assert call(pool, "exact_match", "12").value == 1.0


@pytest.mark.parametrize(
    ("function", "answer", "value"),
    [
        ("exact_match", "12", 0.0),
        ("numeric_match", "12", 0.0),
        ("choice_match", "B", 0.0),
        ("think_answer_format", None, 0.0),
        ("knights_knaves", "Zoey is a knave", -2.0),
        ("math_match", "12", 0.0),
    ],
)
@pytest.mark.parametrize("unit", ["1", "a", "{", "((", "<answer>", "\\boxed{", "is a knight "])
def test_an_answer_of_ten_megabytes(pool, function, answer, value, unit):
    found = call(pool, function, unit * (10_000_000 // len(unit)), answer)
    assert found.value == value or (found.value is None and found.failure is not None)
    assert_works(pool)


@pytest.mark.parametrize("response", ["a" * 60 + "!", "a" * 10_000_000 + "!"])
def test_a_catastrophic_pattern_fails_and_its_process_lives_on(pool, response):
    [before] = [child.process_group for child in pool._children]
    # Of ten megabytes, the search may come to the limit of memory first.
    assert call(pool, "regex", response).failure in ("raised TimeoutError: regex timed out", "raised MemoryError: ")
    assert [child.process_group for child in pool._children] == [before]
    assert call(pool, "regex", "aaa").value == 1.0


@pytest.mark.parametrize(
    "expression",
    [
        "{" * 1900 + "1" + "}" * 1900,
        r"\frac{1}{" * 300 + "2" + "}" * 300,
        r"\sqrt{" * 500 + "2" + "}" * 500,
        "9^{9^{9^{9^{9}}}}",
        "10^{10000000}",
        "(" * 1900 + ")" * 1900,
    ],
)
def test_deep_and_huge_mathematics_is_wrong_or_fails(pool, expression):
    found = call(pool, "math_match", f"\\boxed{{{expression}}}")
    assert found.value == 0.0 or found.failure is not None
    assert_works(pool)


def test_a_loop_costs_its_own_call(pool):
    assert call(pool, "loop", "").failure == f"did not return within rewards.timeout_s={LIMIT_S}"
    assert_works(pool)


def test_a_call_has_no_more_memory_than_it_may(pool):
    assert call(pool, "hog", str(100 * 2**20)).value == 100 * 2**20
    assert call(pool, "hog", str(4 * MEMORY_MIB * 2**20)).failure == "raised MemoryError: "
    assert_works(pool)


def test_a_fork_bomb_is_killed(file, monkeypatch):
    """It has 2 to the power of its forks processes, too few to do harm where it is not stopped."""
    monkeypatch.setattr(pools, "MOST_PROCESSES", 20)
    pool = FunctionPool([RewardFunction(function=f"{file}:bomb", name="bomb"), "exact_match"], None, 1, WAIT_S)
    try:
        [pgid] = [child.process_group for child in pool._children]
        found = call(pool, "bomb", "6").failure
        assert found.startswith("had ") and found.endswith(" processes at once, more than 20,")
        assert not any(os.getpgid(p.pid) == pgid for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE)
        assert_works(pool)
    finally:
        pool.close()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_a_failure(pool, value):
    result = call(pool, "number", value)
    sample = Sample("s", Prompt("p", "", [1]), [7], [-1.0], [True], (VersionRun(0, 1),), "stop", value)
    score, _ = Scorer([RewardFunction(function="f")]).score(sample, {"f": result})
    assert not math.isfinite(result.value) and score.value is None
    assert score.failure == f"rewards.functions: f returned {value}, not a finite number or a bool, on sample s"
