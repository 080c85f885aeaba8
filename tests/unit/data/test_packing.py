"""Invariants of bundling, packing and balancing over random lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import Bundle, Lengths, balance, bundle, pack, schedule, share_out, spread
from megarl.models.token_cost import TokenCost
from tests.packing import packing

BUDGET = 100
LENGTHS = st.lists(st.builds(Lengths, st.sampled_from("abcd"), st.just(20), st.integers(1, 80)), max_size=40)


def indexes(groups) -> list[int]:
    return sorted(i for members in groups for i in members)


def cost(lengths, members, share_prompts: bool) -> int:
    """Tokens of a pack, counted by hand: each prompt once if shared, else once per sample."""
    prompts = {lengths[i].prompt for i in members} if share_prompts else [lengths[i].prompt for i in members]
    return 20 * len(prompts) + sum(lengths[i].response_tokens for i in members)


@given(LENGTHS, st.booleans())
def test_bundles_keep_every_sample_once_within_the_budget(lengths, share_prompts):
    bundles = bundle(lengths, packing(shares_prompts=share_prompts))
    assert indexes(b.samples for b in bundles) == list(range(len(lengths)))
    for b in bundles:
        assert len({lengths[i].prompt for i in b.samples}) == 1
        assert b.num_tokens == cost(lengths, b.samples, share_prompts) <= BUDGET


def test_documents_count_with_their_padding():
    [a, b] = bundle([Lengths("a", 3, 4), Lengths("a", 3, 5)], packing(shares_prompts=False, document_multiple=4))
    assert (a.num_tokens, b.num_tokens) == (8, 8)


def test_cost_counts_tokens_scored_tokens_and_pairs():
    [item] = bundle([Lengths("a", 3, 4), Lengths("a", 3, 1)], packing(cost=TokenCost(attended=0.5, scored=10.0)))
    pairs = (1 + 2 + 3 + 4 + 5 + 6 + 7) + (1 + 2 + 3 + 4)
    assert item.cost == 8 + 10.0 * 5 + 0.5 * pairs


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60))
def test_pack_keeps_the_budget_and_wastes_less_than_half(sizes):
    microbatches = pack([Bundle((i,), size, size) for i, size in enumerate(sizes)], BUDGET)
    assert indexes(microbatches) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= BUDGET for members in microbatches)
    assert len(microbatches) <= 2 * sum(sizes) / BUDGET + 1  # first fit leaves at most one half empty


def test_a_sample_above_the_budget_is_refused():
    with pytest.raises(
        ValueError, match=r"tokens_per_microbatch: .* 50 tokens, and sample 1 alone has 60; .* least 60"
    ):
        bundle([Lengths("a", 5, 10), Lengths("b", 20, 40)], packing(token_budget=50))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 8))
def test_balance_keeps_ranks_within_one_item(costs, num_ranks):
    ranks = balance(costs, num_ranks)
    assert indexes(ranks) == list(range(len(costs)))
    loads = [sum(costs[i] for i in members) for members in ranks]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_schedule_gives_every_rank_as_many_microbatches(lengths, num_ranks, share_prompts, multiple):
    wanted = packing(shares_prompts=share_prompts, num_ranks=num_ranks, microbatch_multiple=multiple)
    ranks = schedule(lengths, wanted)
    assert len(ranks) == num_ranks
    [count] = {len(microbatches) for microbatches in ranks}
    assert count % multiple == 0
    needed = max(len(pack(share, BUDGET)) for share in share_out(lengths, wanted))
    assert needed <= count < needed + multiple
    assert indexes(members for microbatches in ranks for members in microbatches) == list(range(len(lengths)))
    assert all(cost(lengths, m, share_prompts) <= BUDGET for microbatches in ranks for m in microbatches)


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=30), st.integers(0, 4))
def test_spread_keeps_the_budget_and_is_even_where_there_is_room(sizes, more):
    bundles = [Bundle((i,), size, size) for i, size in enumerate(sizes)]
    packed = pack(bundles, BUDGET)
    spread_out = spread(bundles, len(packed) + more, BUDGET)
    assert len(spread_out) == len(packed) + more
    assert indexes(spread_out) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in members) for members in spread_out]
    assert max(loads) <= BUDGET
    if sum(sizes) <= BUDGET:
        assert max(loads) - min(loads) <= max(sizes)


def test_microbatches_that_a_pipeline_needs_beyond_the_budgets_share_the_samples():
    lengths = [Lengths(f"{i}", 0, tokens) for i, tokens in enumerate((60, 50, 40, 30, 20))]
    [ranks] = schedule(lengths, packing(microbatch_multiple=4))
    assert sorted(sum(lengths[i].num_tokens for i in members) for members in ranks) == [40, 50, 50, 60]


def test_what_only_first_fit_gets_into_the_budget_stays_as_it_packs_it():
    """3 + 3 and 2 + 2 + 2: spread, the last 2 would find both at 5 of 6. 5 and 2 + 2 + 2: where the short ones cost
    more, they would be everywhere before the long one comes."""
    bundles = [Bundle((i,), size, size) for i, size in enumerate((3, 3, 2, 2, 2))]
    assert spread(bundles, 2, 6) == [(0, 1), (2, 3, 4)]
    assert spread([Bundle((i,), size, 1 / size) for i, size in enumerate((5, 2, 2, 2))], 3, 6) == [(0,), (1, 2, 3), ()]


@given(LENGTHS, st.integers(1, 5))
def test_no_rank_has_more_to_do_than_with_whole_or_with_single_samples(lengths, num_ranks):
    wanted = packing(num_ranks=num_ranks)
    ranks = share_out(lengths, wanted)
    assert indexes(b.samples for rank in ranks for b in rank) == list(range(len(lengths)))
    most = max(sum(cost(lengths, b.samples, True) for b in rank) for rank in ranks)
    for size in (None, 1):
        costs = [b.cost for b in bundle(lengths, wanted, size)]
        assert most <= max(sum(costs[i] for i in rank) for rank in balance(costs, num_ranks))


def test_samples_of_a_prompt_are_parted_only_where_a_rank_would_wait():
    ranks = share_out([Lengths("a", 20, 10)] * 8, packing(num_ranks=4))
    assert [[b.samples for b in rank] for rank in ranks] == [[(2 * i, 2 * i + 1)] for i in range(4)]
    ranks = share_out([Lengths(prompt, 20, 10) for prompt in "aaaabbbb"], packing(num_ranks=2))
    assert [[b.samples for b in rank] for rank in ranks] == [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]


def test_a_long_sample_weighs_more_than_short_ones_with_as_many_tokens():
    lengths = [Lengths("long", 0, 90), *(Lengths(f"{i}", 0, 10) for i in range(9))]
    quadratic = packing(num_ranks=2, cost=TokenCost(attended=1.0, scored=0.0))
    [with_long] = [rank for rank in schedule(lengths, quadratic) if (0,) in rank]
    assert indexes(with_long) == [0]


PAIRS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 40)), max_size=20)


@given(PAIRS, st.integers(1, 4), st.booleans())
def test_pairs_stay_together_and_side_by_side(pairs, num_ranks, share_prompts):
    lengths = [Lengths(prompt, 10, tokens) for prompt, *both in pairs for tokens in both]
    units = [(i, i + 1) for i in range(0, len(lengths), 2)]
    ranks = schedule(lengths, packing(num_ranks=num_ranks, shares_prompts=share_prompts), units)
    assert indexes(members for rank in ranks for members in rank) == list(range(len(lengths)))
    for members in (members for rank in ranks for members in rank):
        assert list(zip(members[::2], members[1::2], strict=True)) == [unit for unit in units if unit[0] in members]
        tokens = sum(lengths[i].response_tokens for i in members)
        prompts = {lengths[i].prompt for i in members} if share_prompts else members
        assert tokens + 10 * len(prompts) <= BUDGET


def test_a_pair_above_the_budget_is_refused():
    lengths = [Lengths("a", 10, 30), Lengths("a", 10, 20)]
    with pytest.raises(ValueError, match=r"the pair of samples 0 and 1 has 60; a pair is never split .* least 60"):
        bundle(lengths, packing(token_budget=50), units=[(0, 1)])
    with pytest.raises(ValueError, match=r"the pair of samples 0 and 1 has 70"):
        bundle(lengths, packing(token_budget=60, shares_prompts=False), units=[(0, 1)])
