"""Compact plans decode to the original plan; members decode exactly their own part, in order."""

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
def test_part_has_only_the_hops_and_writes_of_its_members(case, members_per_part, replicas):
    plan = plan_of(*case, replicas)
    names = plan.holders
    sent = pickle.loads(pickle.dumps(CompactPlan.of(plan)))
    assert sent.part(names) == plan
    for member_names in (names[i : i + members_per_part] for i in range(0, len(names), members_per_part)):
        part, members = sent.part(member_names), {names.index(name) for name in member_names}

        def contents(any_plan, members=members):
            """Return the link and the contents of each hop of the members."""
            hops = ((any_plan.buckets[hop.bucket], hop.link) for hop in any_plan.order if members & {*hop.link})
            return [(link, link in b.forwards, b.moves, b.num_bytes) for b, link in hops]

        assert contents(part) == contents(plan)
        assert len(part.order) == len(contents(part))
        assert all(members & {*link} for bucket in part.buckets for link in (*bucket.links, *bucket.forwards))
        for name in {*member_names} & {*plan.destinations}:
            assert part.into(name) == plan.into(name)


def test_empty_plan_round_trips():
    nothing = Plan(("megatron:0", "vllm:0.0"), nodes=(0, 1), num_sources=1, buckets=(), padding=(), devices=(3, None))
    assert CompactPlan.of(nothing).part(["vllm:0.0"]) == nothing


def test_plan_without_order_round_trips():
    plan = replace(plan_of(config_of(), layout_of(tp=3), 1, 2), order=())
    assert CompactPlan.of(plan).part(plan.holders) == plan


def test_names_and_rectangles_are_stored_once():
    """Doubling the replicas adds links and hops, but no moves, names or rectangles."""
    one, two = (CompactPlan.of(plan_of(config_of(), layout_of(tp=3), 1, replicas)) for replicas in (1, 2))
    assert len(two.links) > len(one.links) and two.moves.shape == one.moves.shape
    assert set(two.names) == set(one.names) and set(two.rectangles) == set(one.rectangles)
    assert all(len(set(terms)) == len(terms) for plan in (one, two) for terms in (plan.names, plan.rectangles))
