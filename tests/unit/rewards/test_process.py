import math

import pytest

from megarl.rewards.process import aggregated, on_trained_tokens, step_ends, turn_ends


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", ".", "b", ".", "c"], [1, 3, 4]),
        (["a", ".", "b", "."], [1, 3]),  # the last token counts only once
        (["a", "b"], [1]),
        ([".", ".", "."], [0, 1, 2]),
        (["a. b", ". c.", ""], [0, 1, 2]),  # two ends in one token count once; an empty last token counts
    ],
)
def test_step_ends_are_found(pieces, ends):
    assert step_ends(pieces, ".") == ends


def test_end_that_spans_tokens_belongs_to_the_last():
    assert step_ends(["a\n", "\n", "b", "\n\nc", "d"], "\n\n") == [1, 3, 4]
    assert step_ends(["\n", "\n", "\n"], "\n\n") == [1, 2]


def test_aggregated_by_each_method():
    scores = [0.5, -1.0, 2.0]
    assert [aggregated(how, scores) for how in ("mean", "sum", "min", "last")] == [0.5, 1.5, -1.0, 2.0]
    assert math.isnan(aggregated("last", [math.inf, 1.0]))


def test_score_of_an_untrained_token_goes_to_the_last_action():
    scores = {0: 1.0, 1: 2.0, 2: 4.0, 4: 8.0, 5: 16.0}
    mask = [False, True, False, True, True, False]
    assert on_trained_tokens(scores, mask) == [math.nan, 2.0 + 4.0, math.nan, math.nan, 8.0 + 16.0, math.nan]
    assert on_trained_tokens(scores, [True] * 6) == [1.0, 2.0, 4.0, math.nan, 8.0, 16.0]
    assert on_trained_tokens(scores, [False] * 6) == [math.nan] * 6


@pytest.mark.parametrize(
    ("mask", "ends"),
    [
        ([True] * 3, [2]),
        ([False, True, True, False, False, True, False], [2, 5]),
        ([True, False, True], [0, 2]),
        ([False, False], []),
        ([], []),
    ],
)
def test_turn_ends_before_an_untrained_token(mask, ends):
    assert turn_ends(mask) == ends
