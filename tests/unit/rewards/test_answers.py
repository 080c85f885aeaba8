"""Rewards for answers matched by patterns, for mathematical answers and for length."""

from __future__ import annotations

import math
import threading

import pytest
import sympy

from megarl.rewards.registry import asked_columns, resolve


@pytest.mark.parametrize(
    ("options", "response", "answer", "value"),
    [
        ({"pattern": r"^\d+$"}, "12", None, True),
        ({"pattern": r"^\d+$"}, "a12", None, False),
        ({"pattern": r"\d+", "whole": True}, " 12\n", None, True),
        ({"pattern": r"\d+", "whole": True}, "12 or 13", None, False),
        ({"pattern": r"#### (?P<answer>.+)"}, "#### 5\n#### 12", 12, True),
        ({"pattern": r"#### (?P<answer>.+)"}, "#### 12\n#### 5", 12, False),
        ({"pattern": r"#### (?P<answer>.+)"}, "12", 12, False),
        ({"pattern": r"is (?P<answer>\w+)"}, "It is PARIS", "Paris", False),
        ({"pattern": r"is (?P<answer>\w+)", "ignore_case": True}, "It IS PARIS", "Paris", True),
    ],
)
def test_regex_match_compares_the_matched_answer(options, response, answer, value):
    assert resolve("regex_match", options)("", response, answer) is value


def test_regex_match_with_answer_group_needs_an_answer():
    with pytest.raises(ValueError, match=r"regex_match: .* the prompt has no answer"):
        resolve("regex_match", {"pattern": "(?P<answer>a)"})("", "a", None)


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{2}{4}}", True),
        (r"$x = \sqrt{8}$", r"$2\sqrt{2}$", True),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", True),
        (r"\boxed{(1, 2]}", "(1,2]", True),
        (r"\boxed{(1, 2)}", "(1,2]", False),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", True),
        ("The answer is 12.", 12, True),
        (r"\boxed{13}, no, \boxed{12}", "12", True),
        (r"\boxed{12}, no, \boxed{13}", "12", False),
        (r"\boxed{\text{Paris}}", "Paris", True),
        ("", "12", False),
        ("I do not know", "12", False),
    ],
)
def test_math_match_compares_expressions(response, answer, value):
    assert resolve("math_match")("", response, answer) is value


def test_math_match_of_fractions_agrees_with_sympy():
    """sympy decides which fractions in different forms are equal."""
    match = resolve("math_match")
    pairs = [(a, b) for a in range(1, 6) for b in range(1, 6)]
    for a, b in pairs:
        for c, d in pairs[::7]:
            equal = sympy.Rational(a, b) == sympy.Rational(c, d)
            assert match("", rf"\boxed{{\dfrac{{{a}}}{{{b}}}}}", f"{c}/{d}") is bool(equal)


def test_math_match_works_outside_the_main_thread():
    """math-verify's timeouts use signals, which only the main thread can receive."""
    match, results = resolve("math_match"), []
    thread = threading.Thread(target=lambda: results.append(match("", r"\boxed{\frac{2}{4}}", "0.5")))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize("answer", [None, ""])
def test_math_match_of_an_invalid_answer_raises(answer):
    with pytest.raises(ValueError, match=r"math_match: the answer .* is not a mathematical expression"):
        resolve("math_match")("", "12", answer)


def test_math_match_passes_on_errors_of_math_verify(monkeypatch):
    def broken(*_, **__):
        raise RecursionError("deep")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", broken)
    with pytest.raises(RecursionError):
        resolve("math_match")("", r"\boxed{\frac{1}{3}}", "0.25")


def test_math_match_of_a_slow_comparison_raises():
    with pytest.raises(BaseException, match="Timeout during"):
        resolve("math_match", {"timeout_s": 1})("", r"\boxed{9^{9^{9^{9}}}}", "1")


def test_length_penalty_is_linear():
    penalty = resolve("length_penalty", {"free_tokens": 100, "per_tokens": 50})
    lengths = (0, 100, 150, 125)
    assert [penalty("", "", None, num_response_tokens=n) for n in lengths] == [0, 0, -1, -0.5]
    assert asked_columns(penalty, 3) == {"num_response_tokens": True}


def test_soft_overlong_uses_its_own_limit():
    punished = resolve("soft_overlong", {"max_tokens": 100, "buffer": 20})
    lengths = (0, 80, 81, 90, 100, 120)
    rewards = [punished("", "", None, num_response_tokens=n) for n in lengths]
    assert rewards == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert asked_columns(punished, 3) == {"num_response_tokens": True}


@pytest.mark.parametrize(
    ("n", "response", "reward"),
    [
        (0, "12", 2.0),
        (500, "12", 1.5),
        (250, "12", 1 + (1 + math.sqrt(0.5)) / 2),
        (0, "x", -10.0),
        (500, "x", -5.0),
        (999, "x", pytest.approx(0, abs=1e-4)),
        (1000, "12", -10.0),
        (1000, "x", -10.0),
    ],
)
def test_cosine_length_at_known_points(n, response, reward):
    """The cosine is known at both ends and in the middle."""
    cosine = resolve("cosine_length", {"max_tokens": 1000})
    assert cosine("", response, "12", num_response_tokens=n) == pytest.approx(reward)


def test_cosine_length_verifier_has_options_and_columns(tmp_path):
    (tmp_path / "f.py").write_text(
        "def f(prompt, response, answer, level, *, scale=1):\n    return level * scale > 5\n"
    )
    verifier = {"function": f"{tmp_path}/f.py:f", "options": {"scale": 3}}
    cosine = resolve("cosine_length", {"max_tokens": 10, "verifier": verifier})
    assert asked_columns(cosine, 3) == {"num_response_tokens": True, "level": True}
    assert [cosine("", "", None, num_response_tokens=0, level=level) for level in (1, 2)] == [-10.0, 2.0]
