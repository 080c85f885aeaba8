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
def test_settles_on_b(response, answer):
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
def test_does_not_settle_on_b(response):
    assert not choice_match("", response, "B")


def test_the_word_i_is_no_option():
    assert choice_match("", "The answer is I", "I")
    assert not choice_match("", "The answer is I think B", "I")


@pytest.mark.parametrize("answer", [None, "", "AB", "12", "A or B", "é"])
def test_an_answer_that_is_no_letter_fails(answer):
    with pytest.raises(ValueError, match="choice_match needs one"):
        choice_match("", "B", answer)


@pytest.mark.parametrize("part", ["answer", "answer is ", "(", "answer is ((((((((", r"\boxed{\text{", "A ", "\n", "*"])
def test_a_megabyte_of_what_is_looked_for_ends(part):
    """A search whose time grows with the square of the response would take hours."""
    assert not choice_match("", part * (1_000_000 // len(part)), "B")
