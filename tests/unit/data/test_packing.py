"""Invariants of bundling, packing and balancing for random lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import Bundle, Lengths, balance, bundle, pack, schedule, share_out, spread
from megarl.models.token_cost import TokenCost
from tests.packing import packing

BUDGET = 100
LENGTHS = st.lists(st.builds(Lengths, st.sampled_from("abcd"), st.just(20), st.integers(1, 80)), max_size=40)


def indices(groups) -> list[int]:
    return sorted(i for members in groups for i in members)


def cost(lengths, members, share_prompts: bool) -> int:
    """Count the tokens of a pack by hand: each prompt once if shared, otherwise once per sample."""
    prompts = {lengths[i].prompt for i in members} if share_prompts else [lengths[i].prompt for i in members]
    return 20 * len(prompts) + sum(lengths[i].response_tokens for i in members)


@given(LENGTHS, st.booleans())
def test_bundles_keep_every_sample_once_within_the_budget(lengths, share_prompts):
    bundles = bundle(lengths, packing(shares_prompts=share_prompts))
    assert indices(b.samples for b in bundles) == list(range(len(lengths)))
    for b in bundles:
        assert len({lengths[i].prompt for i in b.samples}) == 1
        assert b.num_tokens == cost(lengths, b.samples, share_prompts) <= BUDGET


def test_bundles_count_documents_with_padding():
    [a, b] = bundle([Lengths("a", 3, 4), Lengths("a", 3, 5)], packing(shares_prompts=False, document_multiple=4))
    assert (a.num_tokens, b.num_tokens) == (8, 8)


def test_cost_counts_tokens_scored_tokens_and_pairs():
    [item] = bundle([Lengths("a", 3, 4), Lengths("a", 3, 1)], packing(cost=TokenCost(attended=0.5, scored=10.0)))
    pairs = (1 + 2 + 3 + 4 + 5 + 6 + 7) + (1 + 2 + 3 + 4)
    assert item.cost == 8 + 10.0 * 5 + 0.5 * pairs


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60))
def test_pack_keeps_the_budget_and_wastes_less_than_half(sizes):
    microbatches = pack([Bundle((i,), size, size) for i, size in enumerate(sizes)], BUDGET)
    assert indices(microbatches) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= BUDGET for members in microbatches)
    assert len(microbatches) <= 2 * sum(sizes) / BUDGET + 1  # first fit leaves at most one less than half full


def test_sample_above_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"50 tokens, but sample 1 has 60 tokens, .* least 60"):
        bundle([Lengths("a", 5, 10), Lengths("b", 20, 40)], packing(token_budget=50))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 8))
def test_balance_keeps_ranks_within_one_item(costs, num_ranks):
    ranks = balance(costs, num_ranks)
    assert indices(ranks) == list(range(len(costs)))
    loads = [sum(costs[i] for i in members) for members in ranks]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_schedule_gives_all_ranks_equal_microbatches(lengths, num_ranks, share_prompts, multiple):
    layout = packing(shares_prompts=share_prompts, num_ranks=num_ranks, microbatch_multiple=multiple)
    ranks = schedule(lengths, layout)
    assert len(ranks) == num_ranks
    [count] = {len(microbatches) for microbatches in ranks}
    assert count % multiple == 0
    needed = max(len(pack(share, BUDGET)) for share in share_out(lengths, layout))
    assert needed <= count < needed + multiple
    assert indices(members for microbatches in ranks for members in microbatches) == list(range(len(lengths)))
    assert all(cost(lengths, m, share_prompts) <= BUDGET for microbatches in ranks for m in microbatches)


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=30), st.integers(0, 4))
def test_spread_keeps_the_budget_and_is_even_if_possible(sizes, more):
    bundles = [Bundle((i,), size, size) for i, size in enumerate(sizes)]
    packed = pack(bundles, BUDGET)
    spread_out = spread(bundles, len(packed) + more, BUDGET)
    assert len(spread_out) == len(packed) + more
    assert indices(spread_out) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in members) for members in spread_out]
    assert max(loads) <= BUDGET
    if sum(sizes) <= BUDGET:
        assert max(loads) - min(loads) <= max(sizes)


def test_extra_microbatches_of_a_pipeline_get_samples():
    lengths = [Lengths(f"{i}", 0, tokens) for i, tokens in enumerate((60, 50, 40, 30, 20))]
    [ranks] = schedule(lengths, packing(microbatch_multiple=4))
    assert sorted(sum(lengths[i].num_tokens for i in members) for members in ranks) == [40, 50, 50, 60]


def test_spread_falls_back_to_pack_if_a_bundle_does_not_fit():
    """Spreading sizes 3, 3, 2, 2, 2 leaves no room for the last 2, as both microbatches then hold 5 of 6 tokens.

    Of sizes 5, 2, 2, 2, it places the short bundles first if they cost more, which leaves no room for the long one.
    """
    bundles = [Bundle((i,), size, size) for i, size in enumerate((3, 3, 2, 2, 2))]
    assert spread(bundles, 2, 6) == [(0, 1), (2, 3, 4)]
    assert spread([Bundle((i,), size, 1 / size) for i, size in enumerate((5, 2, 2, 2))], 3, 6) == [(0,), (1, 2, 3), ()]


@given(LENGTHS, st.integers(1, 5))
def test_share_out_beats_whole_and_single_sample_bundles(lengths, num_ranks):
    layout = packing(num_ranks=num_ranks)
    ranks = share_out(lengths, layout)
    assert indices(b.samples for rank in ranks for b in rank) == list(range(len(lengths)))
    most = max(sum(cost(lengths, b.samples, True) for b in rank) for rank in ranks)
    for size in (None, 1):
        costs = [b.cost for b in bundle(lengths, layout, size)]
        assert most <= max(sum(costs[i] for i in rank) for rank in balance(costs, num_ranks))


def test_samples_of_a_prompt_are_split_only_for_balance():
    ranks = share_out([Lengths("a", 20, 10)] * 8, packing(num_ranks=4))
    assert [[b.samples for b in rank] for rank in ranks] == [[(2 * i, 2 * i + 1)] for i in range(4)]
    ranks = share_out([Lengths(prompt, 20, 10) for prompt in "aaaabbbb"], packing(num_ranks=2))
    assert [[b.samples for b in rank] for rank in ranks] == [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]


def test_long_sample_costs_more_than_short_ones_of_equal_sum():
    lengths = [Lengths("long", 0, 90), *(Lengths(f"{i}", 0, 10) for i in range(9))]
    quadratic = packing(num_ranks=2, cost=TokenCost(attended=1.0, scored=0.0))
    [with_long] = [rank for rank in schedule(lengths, quadratic) if (0,) in rank]
    assert indices(with_long) == [0]


PAIRS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 40)), max_size=20)


@given(PAIRS, st.integers(1, 4), st.booleans())
def test_pairs_stay_together_and_adjacent(pairs, num_ranks, share_prompts):
    lengths = [Lengths(prompt, 10, tokens) for prompt, *both in pairs for tokens in both]
    units = [(i, i + 1) for i in range(0, len(lengths), 2)]
    ranks = schedule(lengths, packing(num_ranks=num_ranks, shares_prompts=share_prompts), units)
    assert indices(members for rank in ranks for members in rank) == list(range(len(lengths)))
    for members in (members for rank in ranks for members in rank):
        assert list(zip(members[::2], members[1::2], strict=True)) == [unit for unit in units if unit[0] in members]
        tokens = sum(lengths[i].response_tokens for i in members)
        prompts = {lengths[i].prompt for i in members} if share_prompts else members
        assert tokens + 10 * len(prompts) <= BUDGET


def test_pair_above_the_budget_is_refused():
    lengths = [Lengths("a", 10, 30), Lengths("a", 10, 20)]
    with pytest.raises(ValueError, match=r"samples 0 and 1 has 60 tokens, and a pair is never split .* least 60"):
        bundle(lengths, packing(token_budget=50), units=[(0, 1)])
    with pytest.raises(ValueError, match=r"the pair of samples 0 and 1 has 70"):
        bundle(lengths, packing(token_budget=60, shares_prompts=False), units=[(0, 1)])
