"""Invariants of packing and balancing over random lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import balance, pack, schedule

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@given(LENGTHS)
def test_pack_keeps_every_sample_once_within_the_budget(lengths):
    microbatches = pack(lengths, 100)
    assert sorted(i for members in microbatches for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 100 for members in microbatches)


@given(LENGTHS.filter(bool))
def test_pack_wastes_less_than_half(lengths):
    # First fit leaves at most one microbatch half empty.
    assert len(pack(lengths, 100)) <= 2 * sum(lengths) / 100 + 1


def test_pack_refuses_a_sample_above_the_budget():
    with pytest.raises(ValueError, match=r"tokens_per_microbatch=50: sample 1 alone has 60 .* at least 60"):
        pack([10, 60], 50)


@given(LENGTHS, st.integers(1, 8))
def test_balance_keeps_ranks_within_one_item(lengths, num_ranks):
    ranks = balance(lengths, num_ranks)
    assert sorted(i for members in ranks for i in members) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in members) for members in ranks]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 5))
def test_schedule_gives_every_rank_as_many_microbatches(lengths, num_ranks):
    ranks = schedule(lengths, 100, num_ranks)
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert sorted(i for microbatches in ranks for members in microbatches for i in members) == list(range(len(lengths)))
