"""Worked examples of token weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.aggregation import imitation_weights, sample_weights

NUM_TOKENS, PROMPTS = [4, 1, 0, 3], ["a", "a", "a", "b"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean_of_token_means", [1 / 16, 1 / 4, 0, 1 / 12]),
        ("sequence_mean_of_token_sums", [1 / 4, 1 / 4, 0, 1 / 4]),
        ("sequence_mean_over_max_tokens", [1 / 40, 1 / 40, 0, 1 / 40]),
        ("prompt_mean_of_token_means", [1 / 10, 1 / 10, 0, 1 / 6]),  # two prompts of 5 and 3 tokens
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("token_sum", [1, 1, 0, 1]),
    ],
)
def test_weights_match_worked_example(mode, expected):
    assert sample_weights(mode, NUM_TOKENS, PROMPTS, 10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean_of_token_means", [1 / 12, 1 / 3, 0, 1 / 9, 0]),
        ("sequence_mean_of_token_sums", [1 / 3, 1 / 3, 0, 1 / 3, 0]),
        ("sequence_mean_over_max_tokens", [1 / 30, 1 / 30, 0, 1 / 30, 0]),
        ("prompt_mean_of_token_means", [1 / 10, 1 / 10, 0, 1 / 6, 0]),
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0]),
        ("token_sum", [1, 1, 0, 1, 0]),
    ],
)
def test_exclude_drops_samples_without_trained_tokens(mode, expected):
    """One untrained sample shares a prompt with trained samples; another has its own prompt."""
    weights = sample_weights(mode, [*NUM_TOKENS, 0], [*PROMPTS, "c"], 10, "exclude")
    assert weights == pytest.approx(expected)
    assert sample_weights(mode, [0, 0], ["a", "b"], 10, "exclude") == [0, 0]


def test_imitation_weights_average_positive_examples():
    assert imitation_weights([4, 1, 0, 3], [1.0, 0.5, 1.0, 0.6], 0.5) == pytest.approx([1 / 7, 0, 0, 1 / 7])
    assert imitation_weights([4, 1], [0.0, 0.0], 0.5) == [0, 0]


def test_prompt_without_trained_tokens_counts():
    assert sample_weights("prompt_mean_of_token_means", [2, 0], ["a", "b"], 9) == [1 / 4, 0]
    assert sample_weights("token_mean", [0, 0], ["a", "b"], 9) == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=12))
@pytest.mark.parametrize("mode", ["sequence_mean_of_token_means", "prompt_mean_of_token_means", "token_mean"])
def test_weights_of_means_sum_to_at_most_one(mode, samples):
    """The weights of all trained tokens sum to 1, minus the share of samples or prompts without any."""
    num_tokens, prompts = [n for n, _ in samples], [prompt for _, prompt in samples]
    total = sum(w * n for w, n in zip(sample_weights(mode, num_tokens, prompts, 9), num_tokens, strict=True))
    units = {"token_mean": [sum(num_tokens)], "sequence_mean_of_token_means": num_tokens}
    by_prompt = [sum(n for n, p in samples if p == prompt) for prompt in set(prompts)]
    counted = units.get(mode, by_prompt)
    assert total == pytest.approx(sum(n > 0 for n in counted) / len(counted))
