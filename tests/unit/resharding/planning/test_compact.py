"""A plan comes back from its arrays; members take from them all that is theirs, in order, and nothing of others'."""

from __future__ import annotations

import pickle
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.planning.side import on_nodes
from tests.unit.resharding.cases import config_of, configs, layout_of


def plan_of(config, layout, vllm_tp: int, replicas: int) -> Plan:
    sources = on_nodes(megatron_holders(config, layout, vocab_multiple=4), 2)
    engines = on_nodes(vllm_holders(config, vllm_tp, replicas), 2, first=sources[-1].node + 1)
    return ordered(make_plan(sources, engines, bucket_bytes=100))


@settings(max_examples=25)
@given(configs(), st.integers(1, 3), st.integers(1, 3))
def test_a_part_has_the_hops_and_writes_of_its_members_and_no_others(case, together, replicas):
    plan = plan_of(*case, replicas)
    names = plan.holders
    sent = pickle.loads(pickle.dumps(CompactPlan.of(plan)))
    assert sent.part(names) == plan
    for group in (names[i : i + together] for i in range(0, len(names), together)):
        part, members = sent.part(group), {names.index(name) for name in group}

        def contents(any_plan, members=members):
            """Returns of each hop of the members the link, and what travels over it."""
            hops = ((any_plan.buckets[hop.bucket], hop.link) for hop in any_plan.order if members & {*hop.link})
            return [(link, link in b.forwards, b.moves, b.num_bytes) for b, link in hops]

        assert contents(part) == contents(plan)
        assert len(part.order) == len(contents(part))
        assert all(members & {*link} for bucket in part.buckets for link in (*bucket.links, *bucket.forwards))
        for name in {*group} & {*plan.destinations}:
            assert part.into(name) == plan.into(name)


def test_a_plan_in_which_nothing_moves():
    nothing = Plan(("megatron:0", "vllm:0.0"), nodes=(0, 1), num_sources=1, buckets=(), padding=(), devices=(3, None))
    assert CompactPlan.of(nothing).part(["vllm:0.0"]) == nothing


def test_a_plan_without_an_order():
    plan = replace(plan_of(config_of(), layout_of(tp=3), 1, 2), order=())
    assert CompactPlan.of(plan).part(plan.holders) == plan


def test_names_and_rectangles_are_said_once():
    """Twice the replicas add links and hops, which are small, and no moves."""
    one, two = (CompactPlan.of(plan_of(config_of(), layout_of(tp=3), 1, replicas)) for replicas in (1, 2))
    assert len(two.links) > len(one.links) and two.moves.shape == one.moves.shape
    assert sorted(map(str, two.terms)) == sorted(map(str, one.terms))
