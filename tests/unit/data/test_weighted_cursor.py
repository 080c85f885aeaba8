"""Prompts that are drawn by weights: how often each comes, and what a restored cursor draws."""

import json
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.weighted_cursor import WeightedCursor


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=12),
    takes=st.lists(st.integers(0, 12), max_size=6),
)
def test_no_prompt_comes_twice_in_a_take_as_long_as_there_are_others(weights, takes):
    cursor = WeightedCursor(len(weights), 3, weights)
    for n in takes:
        counts = Counter(cursor.take(n))
        assert counts.total() == n
        assert max(counts.values(), default=0) <= -(-n // len(weights))


def test_prompts_come_as_often_as_their_weights_say():
    """Single draws have these shares; a weight of 0 never comes."""
    cursor = WeightedCursor(4, 0, [1.0, 2.0, 0.0, 5.0])
    counts = Counter(cursor.take(1)[0] for _ in range(8000))
    assert [counts[i] / 8000 for i in range(4)] == pytest.approx([1 / 8, 2 / 8, 0, 5 / 8], abs=0.02)


def test_orders_of_a_take_are_as_likely_as_draws_one_after_the_other():
    """A draw without replacement has the probability w_i / Σ w, then w_j / (Σ w − w_i)."""
    weights = [1.0, 2.0, 5.0]
    cursor = WeightedCursor(3, 1, weights)
    counts = Counter(tuple(cursor.take(2)) for _ in range(8000))
    for i, j in permutations(range(3), 2):
        assert counts[i, j] / 8000 == pytest.approx(weights[i] / 8 * weights[j] / (8 - weights[i]), abs=0.02)


def test_what_is_solved_comes_less_often():
    """Weights 1 − s of Kimi k1.5, but at least 0.1: 0.5, 0.1, 1 and 1 for one that was not seen."""
    cursor = WeightedCursor(4, 0, solved_weight=0.1)
    cursor.note({0: 0.5, 1: 1.0, 2: 0.0})
    counts = Counter(cursor.take(1)[0] for _ in range(8000))
    assert [counts[i] / 8000 for i in range(4)] == pytest.approx([0.5 / 2.6, 0.1 / 2.6, 1 / 2.6, 1 / 2.6], abs=0.02)
    assert cursor.metrics() == pytest.approx({"data/seen_frac": 3 / 4, "data/solve_rate_mean": 0.5})
    assert WeightedCursor(2, 0).metrics() == {}


def test_weights_of_the_data_and_solve_rates_are_multiplied():
    cursor = WeightedCursor(2, 0, [3.0, 1.0], solved_weight=0.05)
    cursor.note({0: 2 / 3})
    counts = Counter(cursor.take(1)[0] for _ in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.5, abs=0.025)


@given(before=st.lists(st.integers(0, 9), max_size=4), after=st.integers(0, 9))
def test_a_restored_cursor_goes_on_where_the_other_stood(before, after):
    weights = [1.0, 0.5, 2.0, 1.0, 1.0]
    cursor = WeightedCursor(5, 3, weights, 0.2)
    for n in before:
        cursor.note({i: i / 5 for i in cursor.take(n)})
    restored = WeightedCursor.restore(json.loads(json.dumps(cursor.state())), weights, 0.2)
    assert restored.take(after) == cursor.take(after)
    assert restored.state() == cursor.state()


def test_seeds_and_takes_have_draws_of_their_own():
    cursors = [WeightedCursor(30, seed) for seed in range(3)]
    takes = [tuple(cursor.take(9)) for _ in range(2) for cursor in cursors]
    assert len(set(takes)) == 6
