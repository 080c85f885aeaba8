"""Weights of tokens, by hand."""

import pytest

from megarl.algorithms.aggregation import sample_weights


def test_aggregation_by_hand():
    assert sample_weights("sequence_mean_of_token_means", [4, 1, 0]) == pytest.approx([1 / 12, 1 / 3, 0])
    assert sample_weights("sequence_mean_of_token_sums", [4, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 0])
    assert sample_weights("token_mean", [4, 1, 0]) == pytest.approx([1 / 5, 1 / 5, 0])
