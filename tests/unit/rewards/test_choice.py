import pytest

from megarl.rewards.choice import choice_match


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(B)",
        "**B**.",
        "B)",
        "I weigh A, C and D.\n\nB",
        "The answer is B",
        "the answer is B because A is absurd",
        "The correct answer is: (B).",
        "Answer: B",
        "**Answer:** B",
        "ANSWER = [B]",
        "answer is *B*",
        r"so $\boxed{B}$",
        r"so $\boxed{\text{B}}$",
        "<think>A or C?</think><answer> B </answer>",
        "The answer is A. No, wait: the answer is B.",
        "The answer is A.\n(B)",
    ],
)
@pytest.mark.parametrize("answer", ["B", "b", "(B)", " B "])
def test_response_selects_b(response, answer):
    assert choice_match("", response, answer)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "b",
        "A",
        "Option B has flaws",
        "B is tempting, but the answer is A",
        "The answer is Berlin",
        "the answer is B's neighbour",
        "The answer is B. No, wait: the answer is A.",
        "B\nThe answer is A",
        "<answer>A</answer>",
        "A B",
        "AB",
        "the answer is not B",
    ],
)
def test_response_does_not_select_b(response):
    assert not choice_match("", response, "B")


def test_word_i_is_not_an_option():
    assert choice_match("", "The answer is I", "I")
    assert not choice_match("", "The answer is I think B", "I")


@pytest.mark.parametrize("answer", [None, "", "AB", "12", "A or B", "é"])
def test_answer_that_is_not_a_letter_raises(answer):
    with pytest.raises(ValueError, match=r"choice_match: the answer .* is not an option's letter"):
        choice_match("", "B", answer)


@pytest.mark.parametrize("part", ["answer", "answer is ", "(", "answer is ((((((((", r"\boxed{\text{", "A ", "\n", "*"])
def test_matching_a_megabyte_takes_linear_time(part):
    """A search of quadratic time would take hours."""
    assert not choice_match("", part * (1_000_000 // len(part)), "B")
