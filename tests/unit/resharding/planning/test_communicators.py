"""Batches that ranks execute one by one on each communicator all finish, and no communicator has two ranks on a GPU."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.communicators import communicators
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Communicator, Hop, Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.planning.side import on_nodes
from tests.unit.resharding.cases import configs, layout_of
from tests.unit.resharding.planning.test_planner import LLAMA_70B
from tests.unit.resharding.planning.test_schedule import plan_of


def sent(plan: Plan) -> Plan:
    return plan.remote if plan.devices else plan


def hops_of(plan: Plan) -> dict[int, list[Hop]]:
    """Return the hops of each member, decoded from its own part of the plan, with the plan's bucket indices."""
    compact, hops = CompactPlan.of(plan), {}
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, bucket in enumerate(plan.buckets):
        for rank in {rank for link in (*bucket.links, *bucket.forwards) for rank in link}:
            numbers[rank].append(number)
    for rank, name in enumerate(plan.holders):
        hops[rank] = [Hop(numbers[rank][hop.bucket], hop.link) for hop in sent(compact.part([name])).order]
    return hops


def num_unfinished(hops: dict[int, list[Hop]], stream_of: Callable[[Hop], int]) -> int:
    """Execute all batches as NCCL does and return the number that never finish.

    The batches of a stream run one by one; a batch runs when it is first in its stream at both ends.
    """
    streams: dict[tuple[int, int], deque[Hop]] = defaultdict(deque)
    for rank, own_hops in hops.items():
        for hop in own_hops:
            streams[rank, stream_of(hop)].append(hop)
    ready = [queue[0] for queue in streams.values()]
    while ready:
        hop = ready.pop()
        ends = [streams[rank, stream_of(hop)] for rank in hop.link]
        if all(end and end[0] == hop for end in ends):
            for end in ends:
                end.popleft()
            ready += [end[0] for end in ends if end]
    return sum(map(len, streams.values()))


def check(plan: Plan) -> None:
    hops = hops_of(plan)
    assert sum(map(len, hops.values())) == 2 * len(sent(plan).order)
    assert num_unfinished(hops, lambda hop: plan.communicator_of(hop.link)) == 0
    assert num_unfinished(hops, lambda hop: 0) == 0, "deadlock if a GPU executes one batch at a time"
    used = defaultdict(set)
    for _, link in sent(plan).order:
        used[plan.communicator_of(link)].update(link)
    for number, (members, is_inside) in enumerate(plan.communicators):
        assert used[number] <= set(members)
        assert not is_inside or len({plan.nodes[member] for member in members}) == 1
        if plan.devices:
            on_devices = Counter(plan.devices[member] for member in members)
            assert max(on_devices.values()) == 1, "NCCL rejects two ranks on one GPU"
    memberships = Counter(member for communicator in plan.communicators for member in communicator.members)
    num_nodes = len(set(plan.nodes))
    assert max(memberships.values(), default=0) <= 1 + ((num_nodes - 1).bit_length() if plan.devices else 1)


@settings(max_examples=10)
@given(configs(), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_all_batches_finish(case, ranks_per_node, replicas, colocated):
    config, layout, vllm_tp = case
    sources = on_nodes(megatron_holders(config, layout, vocab_multiple=4), ranks_per_node)
    first = 0 if colocated else sources[-1].node + 1
    destinations = on_nodes(vllm_holders(config, vllm_tp, replicas), ranks_per_node, first)
    if colocated:
        sources, destinations = (
            [replace(holder, device=gpu) for gpu, holder in enumerate(side)] for side in (sources, destinations)
        )
    check(ordered(make_plan(sources, destinations, bucket_bytes=100)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tp", "replicas", "colocated"), [(2, 16, False), (8, 8, True)])
def test_all_batches_of_a_large_refit_finish(tp, replicas, colocated):
    ranks = on_nodes(megatron_holders(LLAMA_70B, layout_of(tp=8, pp=4, dp=2)), 8)
    engines = on_nodes(vllm_holders(LLAMA_70B, tp, replicas), 8, first=0 if colocated else 8)
    if colocated:
        ranks, engines = ([replace(holder, device=gpu) for gpu, holder in enumerate(side)] for side in (ranks, engines))
    check(ordered(make_plan(ranks, engines)))


def test_inconsistent_orders_deadlock():
    """Two sources send to two destinations, each of which waits for the other source first."""
    plan = plan_of([0, 0, 1, 2], 2, *(([link], [], 10) for link in [(0, 2), (0, 3), (1, 2), (1, 3)]))
    [between] = plan.communicators
    assert between == Communicator((0, 1, 2, 3), is_inside=False)
    hops = defaultdict(list)
    for hop in plan.order:
        for rank in hop.link:
            hops[rank].append(hop)
    assert num_unfinished(hops, lambda hop: 0) == 0
    assert num_unfinished(hops | {0: hops[0][::-1], 1: hops[1][::-1]}, lambda hop: 0) > 0


def test_communicators_contain_only_ranks_that_use_them():
    plan = plan_of([0, 0, 1, 1, 2], 2, ([(0, 2)], [(2, 3)], 10), ([(0, 4)], [], 10))
    assert (
        plan.communicators
        == communicators(plan)
        == (
            Communicator((0, 2, 4), is_inside=False),
            Communicator((2, 3), is_inside=True),
        )
    )
    assert [plan.communicator_of(hop.link) for hop in plan.order] == [int(hop.link == (2, 3)) for hop in plan.order]
