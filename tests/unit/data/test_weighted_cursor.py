"""Weighted sampling of prompts: frequencies, and the state of a restored cursor."""

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
def test_take_has_no_duplicates_unless_prompts_run_out(weights, takes):
    cursor = WeightedCursor(len(weights), 3, weights)
    for n in takes:
        counts = Counter(cursor.take(n))
        assert counts.total() == n
        assert max(counts.values(), default=0) <= -(-n // len(weights))


def test_frequencies_are_proportional_to_weights():
    """Single draws have these shares; a prompt with weight 0 is never drawn."""
    cursor = WeightedCursor(4, 0, [1.0, 2.0, 0.0, 5.0])
    counts = Counter(cursor.take(1)[0] for _ in range(8000))
    assert [counts[i] / 8000 for i in range(4)] == pytest.approx([1 / 8, 2 / 8, 0, 5 / 8], abs=0.02)


def test_orders_are_those_of_sequential_draws():
    """Drawing without replacement, i and then j have probabilities w_i / Σ w and w_j / (Σ w − w_i)."""
    weights = [1.0, 2.0, 5.0]
    cursor = WeightedCursor(3, 1, weights)
    counts = Counter(tuple(cursor.take(2)) for _ in range(8000))
    for i, j in permutations(range(3), 2):
        assert counts[i, j] / 8000 == pytest.approx(weights[i] / 8 * weights[j] / (8 - weights[i]), abs=0.02)


def test_solved_prompts_are_drawn_less_often():
    """Weights 1 − s of Kimi k1.5, but at least 0.1: 0.5, 0.1, 1, and 1 for a prompt that was not sampled yet."""
    cursor = WeightedCursor(4, 0, solved_weight=0.1)
    cursor.note({0: 0.5, 1: 1.0, 2: 0.0})
    counts = Counter(cursor.take(1)[0] for _ in range(8000))
    assert [counts[i] / 8000 for i in range(4)] == pytest.approx([0.5 / 2.6, 0.1 / 2.6, 1 / 2.6, 1 / 2.6], abs=0.02)
    assert cursor.metrics() == pytest.approx({"data/seen_frac": 3 / 4, "data/solve_rate_mean": 0.5})
    assert WeightedCursor(2, 0).metrics() == {}


def test_data_weights_and_solve_rates_are_multiplied():
    cursor = WeightedCursor(2, 0, [3.0, 1.0], solved_weight=0.05)
    cursor.note({0: 2 / 3})
    counts = Counter(cursor.take(1)[0] for _ in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.5, abs=0.025)


@given(before=st.lists(st.integers(0, 9), max_size=4), after=st.integers(0, 9))
def test_restored_cursor_continues_the_draws(before, after):
    weights = [1.0, 0.5, 2.0, 1.0, 1.0]
    cursor = WeightedCursor(5, 3, weights, 0.2)
    for n in before:
        cursor.note({i: i / 5 for i in cursor.take(n)})
    restored = WeightedCursor.restore(json.loads(json.dumps(cursor.state())), weights, 0.2)
    assert restored.take(after) == cursor.take(after)
    assert restored.state() == cursor.state()


def test_seeds_and_takes_have_different_draws():
    cursors = [WeightedCursor(30, seed) for seed in range(3)]
    takes = [tuple(cursor.take(9)) for _ in range(2) for cursor in cursors]
    assert len(set(takes)) == 6
