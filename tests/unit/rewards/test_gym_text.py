"""Verifiers treat responses to reasoning-gym tasks as data: they never run them as code, and always finish in time."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest
from reasoning_gym.factory import DATASETS

from megarl.data.reasoning import Task
from megarl.rewards import reasoning
from megarl.rewards.gym_text import FORMULAS, LITERALS, parse_formula
from megarl.rewards.reasoning import ReasoningGym
from tests.marks import exhaustive_but

SCORE = ReasoningGym()


def score(task: str, response: str) -> float:
    entry = Task(task, {}).dataset(seed=0, size=1)[0]
    return SCORE("", f"<answer>{response}</answer>", entry["answer"], task=task, options={}, metadata=entry["metadata"])


def evaluates_responses(kind: type) -> bool:
    """Return whether the verifier calls `eval` or a similar function."""
    calls = [
        node.func
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[kind.__module__])))
        if isinstance(node, ast.Call) and "answer" in ast.unparse(node)
    ]
    return any(ast.unparse(call).split(".")[-1] in ("eval", "exec", "parse_expr", "sympify") for call in calls)


def test_all_verifiers_that_evaluate_responses_are_known():
    assert {task for task, (kind, _) in DATASETS.items() if evaluates_responses(kind)} == {*LITERALS, *FORMULAS}


@pytest.mark.parametrize(
    "task",
    exhaustive_but([*LITERALS, *FORMULAS], *("n_queens", "spiral_matrix"), *("countdown", "polynomial_multiplication")),
)
def test_response_is_not_run_as_code(task, tmp_path):
    file = tmp_path / "file"
    opened = f"open('{file}', 'w')"
    escaped = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
    escaped += f".__init__.__globals__['system']('touch {file}')"
    built = "+".join(f"chr({ord(character)})" for character in opened)
    for response in (
        opened,
        f"[{opened}]",
        escaped,
        f'S("{escaped}")',
        f"exec({built})",
        f"ｅｘｅｃ({built})",
        f"S({built})",
        f"x.exec({built})",
        "entry['answer']",
        "list(entry['answer'])",
        "entry['answer'].split()",
    ):
        assert score(task, response) <= 0.01
    assert not file.exists()


@pytest.mark.parametrize("response", ["9**9**9**9", "factorial(10**9)", "2**10**12*x"])
def test_formula_that_takes_forever_is_wrong(response, monkeypatch):
    monkeypatch.setattr(reasoning, "FORMULA_S", 0.5)
    assert score("countdown", response) <= 0.01 and score("polynomial_multiplication", response) <= 0.01


def test_number_that_takes_forever_is_wrong(monkeypatch):
    monkeypatch.setattr(reasoning, "FORMULA_S", 0.5)
    assert score("coin_flip", "1e999999999") == 0


def test_nan_is_wrong():
    assert score("complex_arithmetic", "nan") == score("complex_arithmetic", "NaN + nanj") == 0


def test_formulas_and_lists_are_read_as_before():
    import sympy

    formulas = ("6*(98 - 54) - 34.5", "-5*x**9/3 + C", "exp(x)*sin(x) + 3!", ".5*x\n", "2.*x")
    for formula in formulas:
        assert parse_formula(formula) == sympy.parse_expr(formula)
    entry = Task("string_insertion", {}).dataset(seed=0, size=1)[0]
    assert score("string_insertion", str(list(entry["answer"]))) == 0.1
