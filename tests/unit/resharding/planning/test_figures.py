"""Figures of a plan that can be counted by hand, and of the layouts that people use."""

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


def test_a_plan_that_can_be_counted():
    """Two replicas of 100 bytes, on a node; three destinations on another, which keep all of it."""
    sources = [holder(f"s{i}", ((0, 15),), ((15, 25),)) for i in range(2)]
    destinations = [holder(f"d{i}", ((0, 15),), ((15, 25),), node=1) for i in range(3)]
    found = figures(make_plan(sources, destinations), sources, destinations, SPEEDS)
    assert found.bytes_total == 300
    assert found.bytes_wasted == 0
    assert found.bytes_by_link == {"inter": 100, "intra": 200, "local": 0}
    assert found.written_once
    assert found.source_balance == pytest.approx(60 / 50)
    assert found.floor_seconds == pytest.approx(6)  # 60 bytes out of s0
    assert found.predicted_seconds == pytest.approx(6 + 2 * 60 / 100)  # which its receiver then hands on, twice
    assert found.peak_staging_bytes == 60
    # d0 and d1 receive a bucket of one source each, and hand it on to two others, from whom they have the other one.
    assert found.neighbours == 3
    assert (found.ranks_source, found.ranks_destination) == (2, 3)
    assert len(found.plan_hash) == 64


def test_a_process_has_two_buckets_in_hand():
    sources = [holder("s", ((0, 10),), ((10, 30),), ((30, 45),))]
    destinations = [holder("d", ((0, 10),), ((10, 30),), ((30, 45),), node=1)]
    plan = make_plan(sources, destinations, bucket_bytes=80)
    assert [bucket.num_bytes for bucket in plan.buckets] == [40, 80, 60]
    assert figures(plan, sources, destinations, SPEEDS).peak_staging_bytes == 140


def test_operations_are_messages_of_their_own_or_one_for_all_small_moves():
    """A move of 8 MiB and two small ones go to another node, and are handed on there."""
    places = [((0, 2**21),), ((2**21, 2**21 + 10),), ((2**21 + 10, 2**21 + 30),)]
    sources = [holder("s", *places)]
    destinations = [holder(f"d{i}", *places, node=1) for i in range(2)]
    plan = make_plan(sources, destinations, bucket_bytes=2**26)
    moves = [move for bucket in plan.buckets for move in bucket.moves]
    whole = Bucket((), (), tuple(moves), sum(bucket.num_bytes for bucket in plan.buckets))
    assert [num_messages(replace(whole, moves=tuple(part))) for part in (moves, moves[:1], moves[1:])] == [2, 1, 1]
    assert num_messages(whole, least=8) == 3
    found = figures(plan, sources, destinations, SPEEDS)
    # d0 has one of the source, hands it on, and has the other of d1. Both do so over one communicator.
    assert (found.neighbours, found.operations) == (2, 3)
    # d0: 128 MiB for other nodes, and for d1 12 MiB a channel.
    assert (found.communicators, found.communicator_bytes) == (2, (128 + 32 * 12) * 2**20)
    delayed = figures(plan, sources, destinations, replace(SPEEDS, latency=1000.0))
    # Of the large one, where it is handed on, and where d1 hands on the other, not at the same time.
    assert delayed.predicted_seconds - found.predicted_seconds == pytest.approx(3 * 1000)
    assert delayed.floor_seconds == found.floor_seconds


def test_bytes_that_enter_a_node_twice_are_wasted():
    sources = [holder("s", ((0, 10),))]
    apart = [holder(f"d{i}", ((0, 10),), node=1 + i) for i in range(2)]
    together = [holder(f"d{i}", ((0, 10),), node=1) for i in range(2)]
    plan = make_plan(sources, apart)
    plan = type(plan)(plan.holders, (0, 1, 1), plan.num_sources, plan.buckets, plan.padding)
    assert figures(plan, sources, together, SPEEDS).bytes_wasted == 40


def test_replicas_that_overlap_in_part_have_a_mean_of_their_own():
    """Both have the first half, only one has the second: it must give that alone, and half of the rest."""
    sources = [holder("both", ((0, 2**19),), ((2**19, 2**20),)), holder("first", ((0, 2**19),))]
    destinations = [holder("d", ((0, 2**19),), ((2**19, 2**20),), node=1)]
    found = figures(make_plan(sources, destinations), sources, destinations, SPEEDS)
    assert found.source_balance == 1


def test_what_stays_on_a_device_takes_no_link_and_no_time():
    """Two replicas on a node; a destination beside the first, and one on a device of its own, which takes from both."""
    rectangles = [((start, start + 10),) for start in (0, 10, 20, 30)]
    sources = [replace(holder(f"s{i}", *rectangles), device=i) for i in range(2)]
    destinations = [replace(holder(f"d{i}", *rectangles), device=i) for i in (0, 2)]
    plan = make_plan(sources, destinations)
    found = figures(plan, sources, destinations, SPEEDS)
    assert found.bytes_by_link == {"inter": 0, "intra": 160, "local": 160}
    assert (found.bytes_total, found.bytes_wasted, found.source_balance) == (320, 0, 1)
    assert found.predicted_seconds == found.floor_seconds == pytest.approx(160 / 100)
    late = figures(plan, sources, destinations, replace(SPEEDS, latency=1000.0))
    assert (late.predicted_seconds, late.operations) == (found.predicted_seconds, 0)  # it is read, not sent
    assert late.communicators == late.communicator_bytes == 0
    assert plan.plan_hash != make_plan([replace(s, device=None) for s in sources], destinations).plan_hash
