"""The simulated schedule: constraints of ports, and closeness to the lower bound."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.plan import Bucket, Link, Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import Bandwidth, Schedule, ordered, schedule
from megarl.resharding.planning.side import on_nodes
from tests.unit.resharding.cases import configs, layout_of
from tests.unit.resharding.planning.test_planner import LLAMA_70B

SPEEDS = Bandwidth(inter=10, intra=100)


def plan_of(nodes: list[int], num_sources: int, *buckets: tuple[list, list, int]) -> Plan:
    """Return an ordered plan of buckets (links, forwards, bytes) without moves."""
    plan = Plan(
        holders=tuple(f"holder{i}" for i in range(len(nodes))),
        nodes=tuple(nodes),
        num_sources=num_sources,
        buckets=tuple(
            Bucket(tuple(Link(*link) for link in links), tuple(Link(*link) for link in forwards), (), size)
            for links, forwards, size in buckets
        ),
        padding=(),
    )
    return ordered(plan)


def times(result: Schedule) -> list[tuple[int, int, float, float]]:
    return [(*t.link, pytest.approx(t.start), pytest.approx(t.stop)) for t in result.transfers]


def test_source_sends_to_one_destination_at_a_time():
    result = schedule(plan_of([0, 1, 2], 1, ([(0, 1), (0, 2)], [], 50)), SPEEDS)
    assert times(result) == [(0, 1, 0, 5), (0, 2, 5, 10)]
    assert result.seconds == result.floor_seconds == 10


def test_different_pairs_transfer_concurrently():
    result = schedule(plan_of([0, 0, 1, 2], 2, ([(0, 2), (1, 3)], [], 50)), SPEEDS)
    assert times(result) == [(0, 2, 0, 5), (1, 3, 0, 5)]


def test_forwarding_waits_for_arrival_and_has_own_ports():
    result = schedule(plan_of([0, 1, 1], 1, ([(0, 1)], [(1, 2)], 50), ([(0, 1)], [], 50)), SPEEDS)
    assert times(result) == [(0, 1, 0, 5), (0, 1, 5, 10), (1, 2, 5, 5.5)]


def test_process_sends_or_receives_inside_a_node():
    """Both destinations are ready to forward a bucket to each other at the same time."""
    result = schedule(plan_of([0, 0, 1, 1], 2, ([(0, 2)], [(2, 3)], 50), ([(1, 3)], [(3, 2)], 50)), SPEEDS)
    assert times(result) == [(0, 2, 0, 5), (1, 3, 0, 5), (3, 2, 5, 5.5), (2, 3, 5.5, 6)]
    assert result.floor_seconds == 5


def test_separate_forwarding_waits_for_all_arrivals():
    result = schedule(plan_of([0, 1, 1], 1, ([(0, 1)], [], 50), ([(0, 1)], [], 20), ([(1, 2)], [], 100)), SPEEDS)
    assert times(result) == [(0, 1, 0, 5), (0, 1, 5, 7), (1, 2, 7, 8)]


def test_port_with_most_pending_work_starts_first():
    """Source 1 has more to send than source 0, so it sends first to the destination that both need."""
    plan = plan_of([0, 0, 1, 2], 2, ([(0, 2)], [], 10), ([(1, 2)], [], 10), ([(1, 3)], [], 20))
    assert schedule(plan, SPEEDS).seconds == pytest.approx(3)


@settings(max_examples=25)
@given(configs(), st.integers(1, 4), st.integers(1, 3))
def test_ports_carry_one_bucket_at_a_time(case, ranks_per_node, replicas):
    config, layout, vllm_tp = case
    sources = on_nodes(megatron_holders(config, layout, vocab_multiple=4), ranks_per_node)
    destinations = on_nodes(vllm_holders(config, vllm_tp, replicas), ranks_per_node, first=sources[-1].node + 1)
    plan = ordered(make_plan(sources, destinations, bucket_bytes=100))
    result = schedule(plan, SPEEDS)
    planned = [(i, link) for i, bucket in enumerate(plan.buckets) for link in (*bucket.links, *bucket.forwards)]
    assert sorted((t.bucket, t.link) for t in result.transfers) == sorted(planned)
    ports, arrival = defaultdict(list), {}
    for transfer in result.transfers:
        source, destination = transfer.link
        inside = plan.nodes[source] == plan.nodes[destination]
        ports["out", source, inside].append(transfer)
        ports["in", destination, inside].append(transfer)
        arrival[transfer.bucket, destination] = transfer.stop
    for transfers in ports.values():
        assert all(before.stop <= after.start for before, after in pairwise(transfers))
    for transfer in result.transfers:
        if transfer.link in plan.buckets[transfer.bucket].forwards:
            assert arrival[transfer.bucket, transfer.link.source] <= transfer.start
    busiest = max(sum(t.stop - t.start for t in transfers) for transfers in ports.values())
    assert result.floor_seconds == pytest.approx(busiest)
    assert result.seconds >= busiest * (1 - 1e-9)


@pytest.mark.parametrize(("tp", "replicas"), [(8, 8), (2, 16), (16, 2)])
def test_large_refit_is_close_to_the_bound(tp, replicas):
    ranks = on_nodes(megatron_holders(LLAMA_70B, layout_of(tp=8, pp=4, dp=2)), 8)
    plan = ordered(make_plan(ranks, on_nodes(vllm_holders(LLAMA_70B, tp, replicas), 8, first=8)))
    result = schedule(plan, Bandwidth(inter=50e9, intra=400e9))
    assert result.seconds <= 1.15 * result.floor_seconds
