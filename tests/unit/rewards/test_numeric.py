from fractions import Fraction

import pytest

from megarl.rewards import numeric
from megarl.rewards.numeric import numeric_match


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        ("7 + 5 = 12.", 12),
        ("7+5=12", 12),
        ("first 3, then **12**", 12.0),
        ("-4", -4),
        ("x = −4", -4),
        ("it is +4", 4),
        ("3-5", 5),
        ("x-5", 5),
        ("(2)-3", 3),
        ("5 -3", -3),
        ("1,234,567", 1234567),
        ("$1,234.50", "1234.5"),
        ("1,23", 23),
        ("1,2345", 2345),
        ("12345,678", 678),
        (".5", "1/2"),
        ("0.50", "1/2"),
        ("50/100", 0.5),
        ("-3/4", -0.75),
        ("0.1", 0.1),
        ("1e3", 1000),
        ("2.5E-1", 0.25),
        ("12%", 12),
        ("12 km", 12),
        ("1/2/2024", 2024),
        pytest.param("9" * 5000, "9" * 5000, id="equal-of-5000-digits"),
    ],
)
def test_last_number_equal_to_the_answer_is_correct(response, answer):
    assert numeric_match("", response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", 0),
        ("no number", 0),
        ("12 or 13", 12),
        ("4", -4),
        ("0.33", "1/3"),
        ("0.3333333333333333", "1/3"),
        ("1/0", 0),
        ("1/0", 1),
        ("٣", 3),
        pytest.param("9" * 5000, 9, id="of-5000-digits"),
        ("1e999999999", 1),
        ("1234", "123"),
    ],
)
def test_any_other_response_is_wrong(response, answer):
    assert not numeric_match("", response, answer)


def test_huge_number_is_wrong_without_being_converted(monkeypatch):
    """Converting a million digits would take a minute."""
    monkeypatch.setattr(numeric, "_unsigned", lambda text: Fraction(text) if len(text) < 100 else pytest.fail(text[:9]))
    assert not numeric_match("", "1" * 1_000_000, 12)


@pytest.mark.parametrize("answer", [None, "", "twelve", "#### 12", "1/0", True, float("nan"), [12]])
def test_answer_that_is_not_a_number_raises(answer):
    with pytest.raises(ValueError, match=r"numeric_match: the answer .* is not a number"):
        numeric_match("", "12", answer)
