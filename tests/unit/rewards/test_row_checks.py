"""Checks of all data rows by built-in functions, before a run starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from megarl.config.load import load
from megarl.config.schema import Config, RewardFunction
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.core.prompt import Prompt
from megarl.environments.registry import SHIPPED, answer_check
from megarl.rewards import row_checks, worker
from megarl.rewards.options import CHECK_ROW, SINGLE
from megarl.rewards.pool import FunctionPool
from megarl.rewards.registry import FUNCTIONS, column_parameters, resolve
from megarl.rewards.row_checks import check_rows, require_rows
from megarl.usercode.failures import ProcessLost
from tests.paths import QUICKSTART
from tests.timing import WAIT_S

JUDGE = {"base_url": "http://none", "model": "judge"}
REASONING = {"task": "basic_arithmetic", "options": {}, "metadata": {}}
HUMAN_EVAL = {"entry_point": "add"}

CASES = [
    ("exact_match", {}, {}, ["12", 12, "", False], [None]),
    ("numeric_match", {}, {}, ["12", 1.5, "-1/2"], [None, "twelve", "1/0", [1]]),
    ("choice_match", {}, {}, ["B", "(b)"], [None, "AB", 2]),
    ("regex_match", {"pattern": "(?P<answer>a)"}, {}, ["a", 1], [None]),
    ("regex_match", {"pattern": "a"}, {}, ["a", None], []),
    ("math_match", {}, {}, [r"\frac{1}{2}", 3, "x^2 + 1", "1e-5"], [None, "", "1:00", "(" * 400 + "1" + ")" * 400]),
    ("knights_knaves", {}, {}, ["Zoey is a knave"], [None, "12", "knight knave"]),
    ("reasoning_gym", {}, REASONING, ["12"], []),
    ("reasoning_gym", {}, {**REASONING, "task": "no_such_task"}, [], ["12"]),
    ("reasoning_gym", {}, {**REASONING, "options": {"no_such_option": 1}}, [], ["12"]),
    ("code_tests", {}, {}, ["assert f(1) == 2", ["assert f(1) == 2"]], [None, "", [], [1], "assert f(1) =", "\0"]),
    ("code_tests", {}, HUMAN_EVAL, ["def check(f):\n    assert f(1) == 2"], ["assert f(1) == 2", None]),
    ("code_tests", {}, {**HUMAN_EVAL, "test_setup_code": "import ("}, [], ["def check(f):\n    pass"]),
    (
        "code_stdin_stdout",
        {},
        {},
        [[{"input": "1", "output": "2"}], '{"inputs": ["1"], "outputs": ["2"]}'],
        [None, "", "{", [], "[" * 100_000, {"inputs": ["1"], "outputs": []}, {"inputs": 1, "outputs": 2}, 5],
    ),
    ("cosine_length", {"max_tokens": 5}, {}, ["12"], [None]),
    ("cosine_length", {"max_tokens": 5, "verifier": "numeric_match"}, {}, ["12"], ["twelve"]),
    ("rendered_digits", {}, {}, ["47", 47, "007"], [None, "", "4.7", "-4", "٤٧"]),
    ("generative_judge", JUDGE, {}, ["12"], [None]),
    ("generative_judge", {**JUDGE, "template": "{response}"}, {}, ["12", None], []),
]

WITHOUT_ANSWERS = (
    *("think_answer_format", "length_penalty", "soft_overlong"),
    *("jpeg_compressibility", "jpeg_incompressibility", "clip_score", "aesthetic_score"),
)
"""Functions that do not use the answer."""


@pytest.mark.parametrize(
    ("name", "options", "columns", "valid", "invalid"), CASES, ids=[f"{i}_{case[0]}" for i, case in enumerate(CASES)]
)
def test_answers_that_always_fail_are_found(
    name: str, options: Mapping[str, Any], columns: Mapping[str, Any], valid: Sequence[Any], invalid: Sequence[Any]
) -> None:
    check = getattr(resolve(name, options), CHECK_ROW)
    for answer in valid:
        check(answer, **columns)
    for answer in invalid:
        with pytest.raises(ValueError, match="Fix: "):
            check(answer, **columns)


def test_every_function_that_reads_the_answer_has_a_check() -> None:
    # Cases of ocr_exact are in test_ocr, because it needs an additional package.
    assert {case[0] for case in CASES} | {*WITHOUT_ANSWERS, "ocr_exact"} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [("calculator", "12", [None, "twelve"]), ("search", ["a", "b"], [None, {"target": None}, {"other": 1}])],
)
def test_environments_check_answers(name: str, valid: Any, invalid: Sequence[Any]) -> None:
    check = answer_check(name)
    assert check is not None
    require_rows([prompt(0, valid)], check)
    for answer in invalid:
        with pytest.raises(UserError, match=r"rows:2: .* Fix: "):
            require_rows([prompt(1, valid), prompt(2, answer)], check)


def test_built_in_environments_that_compare_answers_check_them() -> None:
    assert [name for name in SHIPPED if answer_check(name) is not None] == ["calculator", "search", "search_tool"]
    assert answer_check("no/such/file.py:Class") is None


def prompt(number: int, answer: Any, **columns: Any) -> Prompt:
    return Prompt(f"rows:{number}", "", np.zeros(1, np.int32), answer=answer, columns=columns)


def config_with(failure_limit: float, *functions: Mapping[str, Any]) -> Config:
    return load(QUICKSTART, [f"rewards.functions={json.dumps(functions)}", f"rewards.failure_limit={failure_limit}"])


def checked(config: Config, prompts: Sequence[Prompt]) -> None:
    pool = FunctionPool(config.rewards.functions, None, 1, WAIT_S)
    try:
        check_rows(config, pool, prompts)
    finally:
        pool.close()


NUMERIC, EXACT = {"function": "numeric_match"}, {"function": "exact_match"}


def test_error_names_the_first_rows_and_their_number() -> None:
    prompts = [prompt(number, None if number % 10 == 9 else number) for number in range(60)]
    lines = [
        "rewards.functions: rows:9, rows:19, rows:29 and 3 more rows: numeric_match: the answer None is not a number. "
        "Fix: use exact_match for text answers",
        "rewards.functions: rows:9, rows:19, rows:29 and 3 more rows: exact_match: the prompt has no answer (null). "
        "Fix: add an answer to the row",
    ]
    with pytest.raises(UserError) as error:
        checked(config_with(0.0, NUMERIC, EXACT), prompts)
    assert str(error.value).splitlines() == lines


def test_large_data_is_checked_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_checks, "ROWS_PER_PROCESS", 500)
    monkeypatch.setattr(row_checks, "usable_cores", lambda: 2)
    sizes = []
    pool = row_checks.function_pool
    monkeypatch.setattr(row_checks, "function_pool", lambda config, size: sizes.append(size) or pool(config, size))
    prompts = [prompt(number, "twelve" if number in (3, 1777) else number) for number in range(2000)]
    with pytest.raises(UserError, match=r"^rewards.functions: rows:3, rows:1777: numeric_match: the answer 'twelve'"):
        checked(config_with(0.0, NUMERIC), prompts)
    assert sizes == [2]


def test_rows_within_the_failure_limit_are_a_warning(capfd: pytest.CaptureFixture) -> None:
    prompts = [prompt(number, None if number == 9 else number) for number in range(20)]
    checked(config_with(0.05, EXACT), prompts)
    assert capfd.readouterr().err.startswith("megarl: warning: rewards.functions: rows:9: exact_match: the prompt has")
    with pytest.raises(UserError):
        checked(config_with(0.04, EXACT), prompts)


def test_functions_check_only_rows_of_their_sources() -> None:
    entries = [{**NUMERIC, "sources": ["math"]}, {**EXACT, "sources": ["text"]}]
    prompts = [prompt(1, "12", source="math"), prompt(2, "Paris", source="text")]
    pool = FunctionPool([RewardFunction(**entry) for entry in entries], None, 1, WAIT_S, source_column="source")
    try:
        check_rows(config_with(0.0, EXACT), pool, prompts)
        with pytest.raises(UserError, match="rows:3: numeric_match"):
            check_rows(config_with(0.0, EXACT), pool, [*prompts, prompt(3, "Paris", source="math")])
    finally:
        pool.close()


def test_rows_are_checked_again_after_their_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FunctionPool([RewardFunction(function="exact_match")], None, 1, WAIT_S)
    try:
        for child in pool._children:
            child.kill()
        problems = pool.check_rows("exact_match", [("12", {}), (None, {})]).result()
        assert problems[0] is None and "the prompt has no answer" in problems[1]
        monkeypatch.setattr(pool, "_run", lambda *_: {"value": None, "failure": "lost its process", "kind": "lost"})
        with pytest.raises(InfrastructureFailure, match="exact_match lost its process in each of 3 attempts to check"):
            pool.check_rows("exact_match", [("12", {})]).result()
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("No module named 'x'", name="x"), r"Fix: run pip install '\.\[rewards\]'"),
        (
            TypeError("not a str"),
            r"Fix: change the type of the value in data\.answer_column or column 'task'; the answer",
        ),
        (MemoryError(), "Fix: raise rewards.memory_mib, or drop the row"),
        (KeyError("a"), r"Fix: change the value in data\.answer_column or column 'task', or drop the row"),
        (ValueError("bad. Fix: do this"), "^bad. Fix: do this$"),
    ],
)
def test_remedy_fits_the_error(error: Exception, remedy: str) -> None:
    def check(answer: Any, *, task: str, other: Any = None) -> None:
        raise error

    [problem] = worker.check_rows(check, [(12, {"task": "a"})])["problems"]
    assert re.search(remedy, problem)
    [problem] = worker.check_rows(check, [(12, {"other": "a"})])["problems"]
    assert problem.startswith("the row has no column 'task', which the reward function requires. Fix: add the column")


def test_process_lost_in_a_check_is_not_blamed_on_the_row() -> None:
    def check(answer: Any) -> None:
        raise ProcessLost("killed")

    reply = worker.check_rows(check, [("12", {})])
    assert (reply["value"], reply["failure"], reply["kind"]) == (None, "raised ProcessLost: killed", "lost")


def test_timeout_of_a_check_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FunctionPool([RewardFunction(function="exact_match")], None, 1, WAIT_S)
    try:
        monkeypatch.setattr(pool, "_run", lambda *_: {"value": None, "failure": "did not return"})
        [problem] = pool.check_rows("exact_match", [("12", {})]).result()
        assert problem.startswith("exact_match did not return while it checked 1 rows. Fix: raise rewards.timeout_s")
    finally:
        pool.close()


def test_optional_columns_reach_code_tests() -> None:
    """Without entry_point, tests that only define `check` would pass with any program."""
    expected = {"sandbox": True, "entry_point": False, "test_setup_code": False}
    assert column_parameters(resolve("code_tests"), len(SINGLE)) == expected
    with pytest.raises(UserError, match="code_tests has no option 'entry_point'"):
        resolve("code_tests", {"entry_point": "f"})
