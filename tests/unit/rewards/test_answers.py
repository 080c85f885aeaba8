"""Rewards for answers matched by patterns, for mathematical answers and for length."""

from __future__ import annotations

import math
import os
import signal
import threading
from functools import partial

import pytest
import sympy

from megarl.rewards.forked import in_child
from megarl.rewards.registry import column_parameters, resolve
from megarl.usercode.failures import ProcessLost
from tests.marks import exhaustive_but
from tests.timing import WAIT_S


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
        resolve("math_match")("", r"\boxed{2\pi}", r"3\pi")


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"9.1 \times 10^{-31}", r"1.6 \times 10^{-19}", False),
        (r"1.6 \times 10^{-19}", r"1.6 \times 10^{-19}", True),
        (r"16 \cdot 10^{-20}", "1.6e-19", True),
        ("0.00000001", "0.00000002", False),
        ("0", "1e-09", False),
        ("1e-30", 0.0, False),
        ("10^{-5}", 1e-05, True),
        ("0.00001", 1e-05, True),
        ("1e-5", 1e-05, True),
        ("e-5", 1e-05, False),
        ("e-05", 1e-05, False),
        ("10^{-5}", "1e-05", True),
        ("10^{20}", 1e20, True),
        ("100000000000000000000", 1e20, True),
        ("e+20", 1e20, False),
        ("-1+2e", "2e-1", True),
        ("0.2", "2e-1", False),
        ("0.333333", r"\frac{1}{3}", True),
        ("0.333", r"\frac{1}{3}", False),
        ("12345678.9", "12345678.1", False),
        ("12345678901", "12345678902", False),
        (r"(9.1 \times 10^{-31}, 2)", r"(1.6 \times 10^{-19}, 2)", False),
        (r"\{0.00000001, 2\}", r"\{0.00000002, 2\}", False),
        (r"x = 0.00000001", "x = 0.00000002", False),
        (r"0.00000001x", "0.00000002x", False),
        (r"10^{-20}\sqrt{2}", r"10^{-20}\sqrt{3}", False),
        (r"10^{-20}\sqrt{8}", r"2\cdot 10^{-20}\sqrt{2}", True),
        ("٣", "3", False),
        ("1٣", "13", False),
        (r"12\,000", "12000", True),
        ("12000", r"12\,000", True),
        ("1~234~567.5", "1234567.5", True),
        (r"(1\,000, 2)", "(1000, 2)", True),
        (r"1\,000", "0", False),
        (r"1\,5", "15", False),
        ("٣/٤", r"\frac{3}{4}", False),
    ],
)
def test_math_match_compares_numbers_as_numbers(response, answer, value):
    assert resolve("math_match")("", rf"so \boxed{{{response}}}", answer) is value


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("1 1/2", "3/2", True),
        ("1 1/2", "1.5", True),
        ("3/2", "1 1/2", True),
        ("3/2", "$1 1/2$", True),
        ("-1 1/2", r"-\frac{3}{2}", True),
        (r"1\frac12", "3/2", True),
        (r"-1\frac{1}{2}", "-1.5", True),
        (r"3 1/2 \text{ cm}", "3.5", True),
        ("1 1/2", "1", False),
        ("1 1/2", "1/2", False),
        ("1 1/2", "11/2", False),
        ("11/2", "1 1/2", False),
        ("-1 1/2", "-1/2", False),
        ("1 3/2", "5/2", False),  # not a mixed number, whose fraction would be below 1
        ("1 1/0", "1", False),
        ("2 1/2, 3", "2.5", False),
        (r"2 \cdot \frac{1}{2}", "2.5", False),
        (r"2\frac{x}{3}", r"2 + \frac{x}{3}", False),
        (r"\text{12,000}", "12000", True),
        ("12000", r"\text{12,000}", True),
        (r"\mathrm{12{,}000}", "12000", True),
        (r"\text{1 1/2}", "1.5", True),
        (r"12\,000", "12000", True),
        (r"\$12,000", "12000", True),
        ("12{,}000", "12000", True),
        ("(12{,}000, 3)", "(12000, 3)", True),
        (r"\text{12,000}", "12", False),
        (r"\text{12,00}", "1200", False),
        (r"\text{1,2}", "12", False),
        ("(12, 000)", "12000", False),
        ("12{,}5", "125", False),
        (r"\{1, 200\}", "1200", False),
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        (r"50\%", "5", False),
        (r"5\%", "0.5", False),
    ],
)
def test_math_match_reads_notations_of_numbers(response, answer, value):
    assert resolve("math_match")("", rf"so \boxed{{{response}}}", answer) is value
    resolve("math_match").check_row(answer)


@pytest.mark.parametrize(
    "response", ["nan", r"\text{NaN}", r"\frac{0}{0}", r"\infty", "inf", "1e999999", r"\frac{1}{0}", r"\infty - \infty"]
)
@pytest.mark.parametrize("answer", ["12", "0.5", 1e-300, r"\frac{1}{3}", r"\sqrt{2}", "x+1", "(1, 2)"])
def test_nan_and_infinity_equal_no_number(response, answer):
    assert resolve("math_match")("", rf"so \boxed{{{response}}}", answer) is False


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        *(("½", "0.5"), ("2½", "2.5"), ("-2½", "-2.5"), ("⅔", r"\frac{2}{3}"), ("1⁄2", "0.5")),
        *(("x²", "x^2"), ("10⁻⁵", 1e-05), ("2√3", r"2\sqrt{3}"), ("∞", r"\infty"), ("2·3", "6"), ("-1²", "-1")),
        *((r"\varnothing", r"\emptyset"), (r"5 \text{ m}²", "5")),
    ],
)
def test_math_match_reads_unicode(written, answer):
    match = resolve("math_match")
    assert match("", rf"\boxed{{{written}}}", answer) is True
    assert match("", rf"\boxed{{{answer}}}", written) is True or "text" in written
    assert match("", rf"\boxed{{{written}}}", "7") is False


def test_math_match_reads_exponents_outside_boxes():
    assert resolve("math_match")("", "The answer is 1e-5.", 1e-05)
    assert not resolve("math_match")("", "The answer is 2e-5.", 1e-05)


HOSTILE = [
    *(
        "9^{9^{9^{9}}}",
        "9^9^9^9",
        "10000000!",
        "((99!)!)!",
        "2^{3^{4^{5^{6}}}}",
        "10^{10000000}",
        "1:00",
        "1:0",
        "1/0",
    ),
    *("(" * 400 + "1" + ")" * 400, "[" * 400, r"\frac{1}{" * 400 + "}" * 400, r"\sqrt{" * 500 + "2" + "}" * 500),
    *(r"\binom{1000000000}{500000000}", r"\sum_{n=1}^{10^{12}} n!", r"\sin(10^{10^{10}})", r"e^{10^{10^{10}}}"),
    *("9" * 3900, "\ud800", "x" * 3000, "²³", "１２", r"\log_{1}{0}", r"\tan(\frac{\pi}{2})", "1" + "+1" * 1900),
    *("x^{10000000} = 2", "x^{99} + x + 1 = 0", r"\gamma(10^{20})", r"\int_0^1 \sin(x^x^x) dx", "NaN", r"\infty"),
]
"""Expressions that are expensive or invalid."""


@pytest.mark.parametrize(
    "response",
    exhaustive_but(
        HOSTILE,
        *("9^{9^{9^{9}}}", "1:00", "1/0", "[" * 400, "9" * 3900, "\ud800", "²³", "x^{99} + x + 1 = 0", r"\infty"),
    ),
)
def test_hostile_expression_is_wrong_and_not_a_failure(response):
    match = resolve("math_match", {"timeout_s": 3})
    for answer in ("1", r"\frac{\sqrt{2}}{3}"):
        assert match("", rf"\boxed{{{response}}}", answer) is False


def test_killed_comparison_is_repeated_before_it_fails(tmp_path):
    calls = tmp_path / "calls"

    def compare(num_kills: int) -> bool:
        with calls.open("a") as file:
            file.write(".")
        if calls.stat().st_size <= num_kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    assert in_child(partial(compare, 2), WAIT_S)
    calls.unlink()
    with pytest.raises(ProcessLost, match="was killed in each of 3 attempts"):
        in_child(partial(compare, 9), WAIT_S)
    assert calls.read_text() == "..."


def test_comparison_that_exceeds_its_memory_is_not_killed():
    with pytest.raises(TimeoutError):
        in_child(lambda: bool(bytearray(2**32)), WAIT_S)


def test_length_penalty_is_linear():
    penalty = resolve("length_penalty", {"free_tokens": 100, "per_tokens": 50})
    lengths = (0, 100, 150, 125)
    assert [penalty("", "", None, num_response_tokens=n) for n in lengths] == [0, 0, -1, -0.5]
    assert column_parameters(penalty, 3) == {"num_response_tokens": True}


def test_soft_overlong_uses_its_own_limit():
    punished = resolve("soft_overlong", {"max_tokens": 100, "buffer": 20})
    lengths = (0, 80, 81, 90, 100, 120)
    rewards = [punished("", "", None, num_response_tokens=n) for n in lengths]
    assert rewards == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert column_parameters(punished, 3) == {"num_response_tokens": True}


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
    assert column_parameters(cosine, 3) == {"num_response_tokens": True, "level": True}
    assert [cosine("", "", None, num_response_tokens=0, level=level) for level in (1, 2)] == [-10.0, 2.0]
