"""Shortcuts around slow parts of math-verify reach the same verdicts."""

import os
import random
from collections.abc import Iterator
from typing import ClassVar

import math_verify
import pytest
import sympy
from antlr4.dfa.DFA import DFA
from latex2sympy2_extended import latex2sympy2

from megarl.rewards.math_answer import MathMatch
from megarl.rewards.math_shortcuts import differ, number, parse_quickly

COUNT = int(os.environ.get("MEGARL_MATH_PAIRS", "75"))
"""Number of pairs that each test checks."""

NOT_PLAIN = (
    "007",
    "1,000",
    "+3",
    "0.5",
    "50\\%",
    "1/0",
    "\\frac{1}{0}",
    "\\frac12",
    "--2",
    "",
    "x",
    "1/2/3",
    "2 3",
    "٣",
)


def parsed(text: str) -> list:
    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def verdict(gold: str, response: str) -> bool:
    return math_verify.verify(parsed(gold), parsed(response), timeout_seconds=None)


def numbers(random: random.Random) -> Iterator[str]:
    """Yield plain numbers in all forms: several of each value, and values close to each other."""
    while True:
        numerator, denominator = random.choice((0, 1, 2, 7, 99998, 99999)), random.choice((1, 2, 3, 99998, 99999))
        factor = random.choice((1, 2, 5)) if max(numerator, denominator) < 10 else 1
        sign, numerator, denominator = random.choice(("", "", "-")), factor * numerator, factor * denominator
        forms = [rf"\{d}frac{{{numerator}}}{{{denominator}}}" for d in ("", "d", "t")] + [f"{numerator}/{denominator}"]
        yield sign + random.choice([*forms, f"{numerator}", f"{random.choice((numerator, 123456789, 123456788))}"])


def test_number_comparison_agrees_with_math_verify():
    generator = random.Random(0)
    texts, verdicts = numbers(generator), set()
    for _ in range(COUNT):
        gold, response = next(texts), next(texts)
        response = generator.choice((response, response, gold))
        is_equal = number(gold) == number(response)
        assert is_equal == verdict(gold, response), (gold, response)
        verdicts.add(is_equal)
    assert verdicts == {True, False}


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_text_that_is_not_a_plain_number_yields_none(text):
    assert number(text) is None


def term(generator: random.Random, depth: int = 2) -> str:
    """Return a LaTeX expression of numbers and variables."""
    if depth == 0:
        return generator.choice(("x", "y", "2", "3", "5", "10", "a_1"))
    first, second = term(generator, depth - 1), term(generator, depth - 1)
    return generator.choice(
        (
            f"{first}+{second}",
            f"{first}-{second}",
            rf"{first}\cdot ({second})",
            f"({first})({second})",
            f"({first})^{generator.choice((2, 3))}",
            f"({first})^{{-1}}",
            rf"\frac{{{first}}}{{{second}}}",
            rf"\sqrt{{{first}}}",
            rf"\sqrt[3]{{{first}}}",
            rf"{first}\sqrt{{{second}}}",
            rf"{first}\pi",
        )
    )


def same(generator: random.Random, text: str) -> str:
    """Return the expression in another form that has the same value for positive variables."""
    return generator.choice((f"0+{text}", rf"\frac{{2({text})}}{{2}}", rf"\left({text}\right)", f"1({text})", text))


def test_differing_expressions_differ_for_math_verify():
    generator, num_differing = random.Random(1), 0
    for _ in range(COUNT // 2):
        gold = term(generator, generator.choice((1, 1, 2)))
        assert not differ(parsed(gold), parsed(same(generator, gold))), gold
        old, new = generator.sample(("2", "3", "5", "10", "+", "-", "x", "y"), 2)
        response = gold.replace(old, new, 1)
        if generator.random() < 0.5 and differ(parsed(gold), parsed(response)):
            num_differing += 1
            assert not verdict(gold, response), (gold, response)
    assert num_differing


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        (r"3\sqrt{2}", r"\sqrt{18}", False),
        (r"3\sqrt{2}", r"\sqrt{19}", True),
        ("x^2+2x+1", "(x+1)^2", False),
        ("x^2+2x+1", "(x+1)^3", True),
        ("2x+y", "2x+z", False),  # different variables are left to math-verify
        ("9\\%+x", "9+x", False),
        (r"2^{10^{9}}\cdot 3", r"2^{10^{9}}\cdot 5", False),
        ("(x-2)^{1/2}x", "(x-3)^{1/2}x", False),  # not real at the point of evaluation
        ("2\\pi", "3\\pi", False),
    ],
)
def test_differ_is_true_only_if_certain(gold, response, expected):
    assert differ(parsed(gold), parsed(response)) is expected


def latex(generator: random.Random) -> str:
    kind = generator.randrange(6)
    one, two = term(generator), term(generator, 1)
    return [
        one,
        f"x = {one}",
        f"[{one}, {two})",
        rf"\{{{one}, {two}\}}",
        rf"({one}, {two}) \cup [1, \infty)",
        rf"\begin{{pmatrix}} {one} & {two} \\ 1 & 2 \end{{pmatrix}}",
    ][kind] + generator.choice(("", "", "", r"\%", " <", ")"))


def test_both_parser_modes_yield_the_same_tree(monkeypatch):
    parse_quickly()
    quick, original = latex2sympy2.PSParser, latex2sympy2.PSParser.__mro__[1]

    class Full(original):
        """The original parser, with its own cache of decisions."""

        decisionsToDFA: ClassVar = [DFA(state, i) for i, state in enumerate(original.atn.decisionToState)]

    def tree(text: str, parser: type) -> str | None:
        monkeypatch.setattr(latex2sympy2, "PSParser", parser)
        try:
            return sympy.srepr(latex2sympy2.latex2sympy(text))
        except Exception:  # the text is not an expression
            return None

    generator, num_none = random.Random(2), 0
    for _ in range(COUNT // 10):
        text = latex(generator)
        parsed_tree = tree(text, quick)
        assert parsed_tree == tree(text, Full), text
        num_none += parsed_tree is None
    assert 0 < num_none < COUNT // 10


def test_math_match_agrees_with_math_verify():
    match, generator = MathMatch(), random.Random(3)
    texts = numbers(generator)
    for _ in range(COUNT // 3):
        gold = generator.choice((next(texts), term(generator, 1)))
        response = generator.choice((next(texts), gold, same(generator, gold), term(generator, 1)))
        expected = response == gold or verdict(gold, response)
        assert match("", f"So it is $\\boxed{{{response}}}$.", gold) == expected, (gold, response)
