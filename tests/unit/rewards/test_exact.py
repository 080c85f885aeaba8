import pytest

from megarl.rewards.exact import exact_match


@pytest.mark.parametrize("response", ["12", " 12\n", "\t12"])
@pytest.mark.parametrize("answer", ["12", 12, " 12 "])
def test_stripped_response_equal_to_the_answer_is_correct(response, answer):
    assert exact_match("", response, answer)


@pytest.mark.parametrize("response", ["", "12.", "12.0", "012", "1 2", "The answer is 12", "12 12", "12\x00"])
def test_any_other_response_is_wrong(response):
    assert not exact_match("", response, "12")


def test_case_matters():
    assert not exact_match("", "paris", "Paris")


def test_missing_answer_is_a_failure():
    with pytest.raises(ValueError, match="no answer"):
        exact_match("", "None", None)
