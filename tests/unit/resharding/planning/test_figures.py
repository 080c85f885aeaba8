"""Figures of plans that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.resharding.planning.figures import figures
from megarl.resharding.planning.messages import num_messages
from megarl.resharding.planning.plan import Bucket
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import Bandwidth
from tests.unit.resharding.planning.test_planner import holder

SPEEDS = Bandwidth(inter=10, intra=100)


def test_figures_of_a_small_plan():
    """Two replicas of 100 bytes on one node; three destinations on another node need all of it."""
    sources = [holder(f"s{i}", ((0, 15),), ((15, 25),)) for i in range(2)]
    destinations = [holder(f"d{i}", ((0, 15),), ((15, 25),), node=1) for i in range(3)]
    result = figures(make_plan(sources, destinations), sources, destinations, SPEEDS)
    assert result.bytes_total == 300
    assert result.bytes_wasted == 0
    assert result.bytes_by_link == {"inter": 100, "intra": 200, "local": 0}
    assert result.written_once
    assert result.source_balance == pytest.approx(60 / 50)
    assert result.floor_seconds == pytest.approx(6)  # s0 sends 60 bytes
    assert result.predicted_seconds == pytest.approx(6 + 2 * 60 / 100)  # the receiver then forwards 60 bytes twice
    assert result.peak_staging_bytes == 60
    # d0 and d1 each receive one bucket from a source, forward it to two others, and receive the other bucket from them.
    assert result.neighbors == 3
    assert (result.ranks_source, result.ranks_destination) == (2, 3)
    assert len(result.plan_hash) == 64


def test_peak_staging_is_two_buckets():
    sources = [holder("s", ((0, 10),), ((10, 30),), ((30, 45),))]
    destinations = [holder("d", ((0, 10),), ((10, 30),), ((30, 45),), node=1)]
    plan = make_plan(sources, destinations, bucket_bytes=80)
    assert [bucket.num_bytes for bucket in plan.buckets] == [40, 80, 60]
    assert figures(plan, sources, destinations, SPEEDS).peak_staging_bytes == 140


def test_operations_count_large_moves_separately():
    """A move of 8 MiB and two small ones are sent to another node and forwarded there."""
    places = [((0, 2**21),), ((2**21, 2**21 + 10),), ((2**21 + 10, 2**21 + 30),)]
    sources = [holder("s", *places)]
    destinations = [holder(f"d{i}", *places, node=1) for i in range(2)]
    plan = make_plan(sources, destinations, bucket_bytes=2**26)
    moves = [move for bucket in plan.buckets for move in bucket.moves]
    whole = Bucket((), (), tuple(moves), sum(bucket.num_bytes for bucket in plan.buckets))
    assert [num_messages(replace(whole, moves=tuple(part))) for part in (moves, moves[:1], moves[1:])] == [2, 1, 1]
    assert num_messages(whole, min_bytes=8) == 3
    result = figures(plan, sources, destinations, SPEEDS)
    # d0 receives one bucket from the source, forwards it, and receives the other from d1, over the same communicator.
    assert (result.neighbors, result.operations) == (2, 3)
    # d0 needs 128 MiB for other nodes, and 12 MiB per channel for d1.
    assert (result.communicators, result.communicator_bytes) == (2, (128 + 32 * 12) * 2**20)
    delayed = figures(plan, sources, destinations, replace(SPEEDS, latency=1000.0))
    # The latencies of receiving, of forwarding, and of receiving from d1 do not overlap.
    assert delayed.predicted_seconds - result.predicted_seconds == pytest.approx(3 * 1000)
    assert delayed.floor_seconds == result.floor_seconds


def test_bytes_entering_a_node_twice_are_wasted():
    sources = [holder("s", ((0, 10),))]
    apart = [holder(f"d{i}", ((0, 10),), node=1 + i) for i in range(2)]
    together = [holder(f"d{i}", ((0, 10),), node=1) for i in range(2)]
    plan = make_plan(sources, apart)
    plan = type(plan)(plan.holders, (0, 1, 1), plan.num_sources, plan.buckets, plan.padding)
    assert figures(plan, sources, together, SPEEDS).bytes_wasted == 40


def test_source_balance_of_partly_overlapping_replicas():
    """Both hold the first half, only one holds the second: its fair share is the second half and half of the first."""
    sources = [holder("both", ((0, 2**19),), ((2**19, 2**20),)), holder("first", ((0, 2**19),))]
    destinations = [holder("d", ((0, 2**19),), ((2**19, 2**20),), node=1)]
    result = figures(make_plan(sources, destinations), sources, destinations, SPEEDS)
    assert result.source_balance == 1


def test_copies_on_a_device_cost_no_time():
    """Two replicas on one node; one destination shares the device of the first, the other reads from both."""
    rectangles = [((start, start + 10),) for start in (0, 10, 20, 30)]
    sources = [replace(holder(f"s{i}", *rectangles), device=i) for i in range(2)]
    destinations = [replace(holder(f"d{i}", *rectangles), device=i) for i in (0, 2)]
    plan = make_plan(sources, destinations)
    result = figures(plan, sources, destinations, SPEEDS)
    assert result.bytes_by_link == {"inter": 0, "intra": 160, "local": 160}
    assert (result.bytes_total, result.bytes_wasted, result.source_balance) == (320, 0, 1)
    assert result.predicted_seconds == result.floor_seconds == pytest.approx(160 / 100)
    late = figures(plan, sources, destinations, replace(SPEEDS, latency=1000.0))
    assert (late.predicted_seconds, late.operations) == (result.predicted_seconds, 0)  # direct reads have no latency
    assert late.communicators == late.communicator_bytes == 0
    assert plan.plan_hash != make_plan([replace(s, device=None) for s in sources], destinations).plan_hash
