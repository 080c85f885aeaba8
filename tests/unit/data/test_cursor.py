import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.cursor import PromptCursor


@given(
    num_prompts=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    takes=st.lists(st.integers(0, 50), max_size=8),
)
def test_every_epoch_contains_every_prompt_once(num_prompts, seed, shuffle, takes):
    cursor = PromptCursor(num_prompts, seed, shuffle)
    taken = []
    for n in takes:
        part = cursor.take(n)
        assert len(part) == n
        taken += part
    for start in range(0, len(taken), num_prompts):
        epoch = taken[start : start + num_prompts]
        is_complete = len(epoch) == num_prompts
        assert sorted(epoch) == list(range(num_prompts)) if is_complete else max(Counter(epoch).values()) == 1


@given(
    num_prompts=st.integers(1, 20),
    before=st.lists(st.integers(0, 50), max_size=4),
    after=st.integers(0, 60),
    shuffle=st.booleans(),
)
def test_restored_cursor_continues_the_order(num_prompts, before, after, shuffle):
    cursor = PromptCursor(num_prompts, seed=3, shuffle=shuffle)
    for n in before:
        cursor.take(n)
    restored = PromptCursor.restore(json.loads(json.dumps(cursor.state())))
    assert restored.take(after) == cursor.take(after)
    assert restored.state() == cursor.state()


def test_order_does_not_depend_on_the_sizes_of_takes():
    one, many = (PromptCursor(7, seed=1, shuffle=True) for _ in range(2))
    assert one.take(30) == [index for n in (1, 6, 0, 13, 10) for index in many.take(n)]


def test_epochs_and_seeds_have_different_orders():
    def epochs(seed: int) -> list[list[int]]:
        cursor = PromptCursor(30, seed, shuffle=True)
        return [cursor.take(30) for _ in range(4)]

    orders = [tuple(order) for seed in range(4) for order in epochs(seed)]
    assert len(set(orders)) == 16
    assert epochs(0) == epochs(0)


def test_all_orders_are_equally_likely():
    orders = Counter(tuple(PromptCursor(3, seed, shuffle=True).take(3)) for seed in range(3000))
    assert len(orders) == 6
    assert all(count == pytest.approx(500, abs=120) for count in orders.values())


def test_order_without_shuffling_is_the_files():
    assert PromptCursor(3, seed=5, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_order_is_the_same_on_every_machine():
    assert PromptCursor(8, seed=0, shuffle=True).take(10) == [0, 5, 6, 4, 3, 1, 2, 7, 0, 6]
