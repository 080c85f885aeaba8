"""The ways around math-verify's slow parts against math-verify itself, which is to say the same."""

import os
import random
from collections.abc import Iterator
from typing import ClassVar

import pytest
import sympy

from megarl.rewards.math_answer import MathMatch
from megarl.rewards.math_shortcuts import differ, number, parse_quickly

DFA = pytest.importorskip("antlr4.dfa.DFA").DFA
math_verify = pytest.importorskip("math_verify")
latex2sympy2 = pytest.importorskip("latex2sympy2_extended.latex2sympy2")

COUNT = int(os.environ.get("MEGARL_MATH_PAIRS", "150"))
"""The pairs that each test looks at."""

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


def verdict(gold: str, said: str) -> bool:
    return math_verify.verify(parsed(gold), parsed(said), timeout_seconds=None)


def numbers(random: random.Random) -> Iterator[str]:
    """Yields numbers in all forms that are compared by themselves: several of each value, and others close by."""
    while True:
        above, below, times = random.choice((0, 1, 2, 7, 99998, 99999)), random.choice((1, 2, 3, 99998, 99999)), 1
        if max(above, below) < 10:
            times = random.choice((1, 2, 5))
        sign, above, below = random.choice(("", "", "-")), times * above, times * below
        forms = [rf"\{d}frac{{{above}}}{{{below}}}" for d in ("", "d", "t")] + [f"{above}/{below}"]
        yield sign + random.choice([*forms, f"{above}", f"{random.choice((above, 123456789, 123456788))}"])


def test_numbers_get_math_verifys_verdict():
    generator = random.Random(0)
    texts, verdicts = numbers(generator), set()
    for _ in range(COUNT):
        gold, said = next(texts), next(texts)
        said = generator.choice((said, said, gold))
        ours = number(gold) == number(said)
        assert ours == verdict(gold, said), (gold, said)
        verdicts.add(ours)
    assert verdicts == {True, False}


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_is_no_plain_number_is_left_to_math_verify(text):
    assert number(text) is None


def term(generator: random.Random, depth: int = 2) -> str:
    """Returns an expression of numbers and variables in LaTeX."""
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
    """Returns the expression written in another way, which has the same value for positive variables."""
    return generator.choice((f"0+{text}", rf"\frac{{2({text})}}{{2}}", rf"\left({text}\right)", f"1({text})", text))


def test_expressions_that_are_said_to_differ_do_so_for_math_verify():
    generator, num_differing = random.Random(1), 0
    for _ in range(COUNT // 2):
        gold = term(generator, generator.choice((1, 1, 2)))
        assert not differ(parsed(gold), parsed(same(generator, gold))), gold
        old, new = generator.sample(("2", "3", "5", "10", "+", "-", "x", "y"), 2)
        said = gold.replace(old, new, 1)
        if generator.random() < 0.5 and differ(parsed(gold), parsed(said)):
            num_differing += 1
            assert not verdict(gold, said), (gold, said)
    assert num_differing


@pytest.mark.parametrize(
    ("gold", "said", "expected"),
    [
        (r"3\sqrt{2}", r"\sqrt{18}", False),
        (r"3\sqrt{2}", r"\sqrt{19}", True),
        ("x^2+2x+1", "(x+1)^2", False),
        ("x^2+2x+1", "(x+1)^3", True),
        ("2x+y", "2x+z", False),  # of other variables: for math-verify to say
        ("9\\%+x", "9+x", False),
        (r"2^{10^{9}}\cdot 3", r"2^{10^{9}}\cdot 5", False),
        ("(x-2)^{1/2}x", "(x-3)^{1/2}x", False),  # no real number at the place that is looked at
        ("2\\pi", "3\\pi", False),
    ],
)
def test_differing(gold, said, expected):
    assert differ(parsed(gold), parsed(said)) is expected


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


def test_latex_gives_the_same_tree_in_both_modes_of_its_parser(monkeypatch):
    parse_quickly()
    quick, original = latex2sympy2.PSParser, latex2sympy2.PSParser.__mro__[1]

    class Full(original):
        """The parser as it was, which shares nothing with the other that either has worked out."""

        decisionsToDFA: ClassVar = [DFA(state, i) for i, state in enumerate(original.atn.decisionToState)]

    def tree(text: str, parser: type) -> str | None:
        monkeypatch.setattr(latex2sympy2, "PSParser", parser)
        try:
            return sympy.srepr(latex2sympy2.latex2sympy(text))
        except Exception:  # of an expression that is none
            return None

    generator, num_none = random.Random(2), 0
    for _ in range(COUNT // 10):
        text = latex(generator)
        found = tree(text, quick)
        assert found == tree(text, Full), text
        num_none += found is None
    assert 0 < num_none < COUNT // 10


def test_answers_get_math_verifys_verdict():
    match, generator = MathMatch(), random.Random(3)
    texts = numbers(generator)
    for _ in range(COUNT // 3):
        gold = generator.choice((next(texts), term(generator, 1)))
        said = generator.choice((next(texts), gold, same(generator, gold), term(generator, 1)))
        assert match("", f"So it is $\\boxed{{{said}}}$.", gold) == (said == gold or verdict(gold, said)), (gold, said)
