"""Hostile responses and functions cost only one sample. The tests use the pool's real processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megarl.config.schema import RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards import pool as pools
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer
from tests.children import matching
from tests.marks import each_value
from tests.timing import LIMIT_S, WAIT_S, wait_until

FUNCTIONS = """
import os, stat, time

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

def fail(prompt, response, answer):
    raise ValueError(response)

def intrude(prompt, response, answer):
    for file in range(3, 100):
        try:
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                os.write(file, response.encode() + b"\\n")
        except OSError:
            pass
"""
OWN = ("loop", "hog", "bomb", "number", "fail", "intrude")
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
    own = [RewardFunction(function=f"{file}:{name}", name=name) for name in OWN]
    shipped = ["exact_match", "numeric_match", "choice_match", "think_answer_format", "knights_knaves"]
    pool = FunctionPool([*own, *shipped, CATASTROPHIC, MATH], None, 1, WAIT_S, memory_mib=MEMORY_MIB)
    yield pool
    pool.close()


def call(pool: FunctionPool, function: str, response: str, answer: object = "12") -> Result:
    return pool.call(function, "", response, answer).result()


def assert_works(pool: FunctionPool) -> None:
    assert call(pool, "exact_match", "12").value == 1.0


LOWEST = {
    "exact_match": ("12", 0.0),
    "numeric_match": ("12", 0.0),
    "choice_match": ("B", 0.0),
    "think_answer_format": (None, 0.0),
    "knights_knaves": ("Zoey is a knave", -2.0),
    "math_match": ("12", 0.0),
}
"""Function -> an answer, and the value of a wrong response."""


@pytest.mark.parametrize(
    ("unit", "function"), each_value(["1", "a", "{", "((", "<answer>", "\\boxed{", "is a knight "], [*LOWEST])
)
def test_ten_megabyte_response_does_not_break_the_pool(pool, function, unit):
    answer, value = LOWEST[function]
    found = call(pool, function, unit * (10_000_000 // len(unit)), answer)
    assert found.value == value or (found.value is None and found.failure is not None)
    assert_works(pool)


@pytest.mark.parametrize("response", ["a" * 60 + "!", "a" * 10_000_000 + "!"])
def test_catastrophic_regex_is_wrong_without_losing_the_process(pool, response):
    [before] = [child.pid for child in pool._children]
    result = call(pool, "regex", response)
    # Do not use a longer response: at ten megabytes, the search could hit the memory limit first.
    assert (result.value, result.failure) == (0.0, None)
    assert [child.pid for child in pool._children] == [before]
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
def test_pathological_math_expression_scores_zero(pool, expression):
    assert call(pool, "math_match", f"\\boxed{{{expression}}}").value == 0.0
    assert_works(pool)


@pytest.mark.exhaustive
def test_infinite_loop_fails_only_its_own_call(file):
    loop = RewardFunction(function=f"{file}:loop", name="loop")
    with closing(FunctionPool([loop, "exact_match"], None, 1, LIMIT_S)) as pool:
        assert call(pool, "loop", "").failure == f"did not return within rewards.timeout_s={LIMIT_S}"
        assert_works(pool)


def test_text_on_the_connection_fails_only_its_own_call(pool):
    assert call(pool, "intrude", "1.0").failure == "sent a message that is not a JSON object"
    assert_works(pool)


@pytest.mark.parametrize("message", ["{}", '{"value": 7.0}', '{"id": 1, "value": 7.0}', '{"problems": [], "x": 1}'])
def test_message_on_the_connection_is_not_a_reply(pool, message):
    """It must neither count as the reply to its own call nor shift the replies to later calls."""
    assert call(pool, "intrude", message).returned == "NoneType"
    assert [call(pool, "number", value).value for value in ("1", "2", "3")] == [1.0, 2.0, 3.0]


def test_lone_surrogate_in_an_error_is_replaced(pool):
    assert call(pool, "fail", "a\ud800").failure == "raised ValueError: a\ufffd"


def test_call_is_limited_to_its_memory(pool):
    assert call(pool, "hog", str(100 * 2**20)).value == 100 * 2**20
    assert call(pool, "hog", str(4 * MEMORY_MIB * 2**20)).failure == "raised MemoryError: "
    assert_works(pool)


def test_fork_bomb_is_killed(file, monkeypatch):
    """n forks give 2^n processes, few enough to be harmless if the test fails."""
    monkeypatch.setattr(pools, "MAX_PROCESSES", 20)
    pool = FunctionPool([RewardFunction(function=f"{file}:bomb", name="bomb"), "exact_match"], None, 1, WAIT_S)
    try:
        [pgid] = [child.pid for child in pool._children]
        found = call(pool, "bomb", "6").failure
        assert found.startswith("had ") and found.endswith(" processes at once, more than 20,")
        in_group = matching(psutil.process_iter(), lambda process: os.getpgid(process.pid) == pgid)
        # A killed process may run for a moment longer.
        wait_until(lambda: not matching(in_group, lambda process: process.status() != psutil.STATUS_ZOMBIE))
        assert_works(pool)
    finally:
        pool.close()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_non_finite_reward_is_a_failure(pool, value):
    result = call(pool, "number", value)
    sample = Sample("s", Prompt("p", "", [1]), [7], [-1.0], [True], (VersionRun(0, 1),), "stop", value)
    score, _ = Scorer([RewardFunction(function="f")]).score(sample, {"f": result})
    assert not math.isfinite(result.value) and score.value is None
    assert score.failure == f"rewards.functions: f returned {value} instead of a finite number or a bool on sample s"
