"""What members need of a plan: all of theirs, in the plan's order, and nothing of others'."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.parts import parts
from megarl.resharding.planner import make_plan
from megarl.resharding.schedule import ordered
from megarl.resharding.side import on_nodes
from tests.unit.resharding.cases import configs


@settings(max_examples=25)
@given(configs(), st.integers(1, 3), st.integers(1, 3))
def test_a_part_has_the_hops_and_writes_of_its_members_and_no_others(case, together, replicas):
    config, layout, vllm_tp = case
    sources = on_nodes(megatron_holders(config, layout, vocab_multiple=4), 2)
    engines = on_nodes(vllm_holders(config, vllm_tp, replicas), 2, first=sources[-1].node + 1)
    plan = ordered(make_plan(sources, engines, bucket_bytes=100))
    names = plan.holders
    groups = [names[i : i + together] for i in range(0, len(names), together)]
    for group, part in zip(groups, parts(plan, groups), strict=True):
        members = {names.index(name) for name in group}

        def contents(of, members=members):
            """Of its members' hops: the link, and what travels over it."""
            hops = ((of.buckets[hop.bucket], hop.link) for hop in of.order if members & {*hop.link})
            return [(link, link in b.onward, b.moves, b.num_bytes) for b, link in hops]

        assert contents(part) == contents(plan)
        assert len(part.order) == len(contents(part))
        assert all(members & {*link} for bucket in part.buckets for link in (*bucket.links, *bucket.onward))
        for name in {*group} & {*plan.destinations}:
            assert part.into(name) == plan.into(name)
