"""Nodes with failing or slow devices, from given states of the ranks' devices."""

from __future__ import annotations

import pytest

from megarl.cluster.departures import NUM_SLOW, SLOWDOWN, Departures, DeviceState

RANKS = {"actor-0": 1, "actor-1": 1, "actor-2": 2, "actor-3": 3}


def observe(departures: Departures, seconds: dict[str, float] | None = None, **errors: dict[str, int]) -> dict:
    """Observe one step, in which the given ranks differ from the others. Return the nodes that should leave."""
    counts = [errors.get(name.replace("-", "_"), {"uncorrected memory errors": 0}) for name in RANKS]
    probes = [(seconds or {}).get(name, 1.0) for name in RANKS]
    departures.observe(RANKS, list(map(DeviceState, counts, probes)))
    return departures.reasons()


def test_only_new_errors_count() -> None:
    """Errors that the device counted before the run may come from an earlier job."""
    departures = Departures()
    before = {"uncorrected memory errors": 3, "pending row remaps": 1}
    assert observe(departures, actor_2=before) == observe(departures, actor_2=before) == {}
    after = {"uncorrected memory errors": 4, "pending row remaps": 1}
    reason = "the device of actor-2 has new uncorrected memory errors"
    assert observe(departures, actor_2=after) == {2: reason}
    assert observe(departures, actor_2=after) == {2: reason}, "the node may have to wait for a spare node"


def test_all_new_kinds_of_errors_are_named() -> None:
    departures = Departures()
    observe(departures, actor_1={})
    reasons = observe(departures, actor_1={"pending row remaps": 1, "failed row remaps": 1})
    assert reasons == {1: "the device of actor-1 has new pending row remaps and failed row remaps"}


def test_node_that_takes_over_a_number_starts_afresh() -> None:
    departures = Departures()
    observe(departures)
    for _ in range(NUM_SLOW):
        observe(departures, {"actor-3": 2.0}, actor_2={"uncorrected memory errors": 1})
    assert departures.reasons().keys() == {2, 3}
    for node in (2, 3):
        departures.forget(node)
    assert observe(departures, {"actor-3": 2.0}, actor_2={"uncorrected memory errors": 1}) == {}


@pytest.mark.parametrize("rank", ["actor-0", "actor-1", "actor-3"])
def test_slow_rank_makes_its_node_leave(rank: str) -> None:
    departures = Departures()
    for _ in range(NUM_SLOW - 1):
        assert observe(departures, {rank: SLOWDOWN + 0.1}) == {}
    assert departures.slowdown == SLOWDOWN + 0.1
    assert observe(departures, {rank: SLOWDOWN + 0.1}).keys() == {RANKS[rank]}
    assert observe(departures) == {} and departures.slowdown == 1.0


def test_only_consecutive_slow_steps_count() -> None:
    departures = Departures()
    for step in range(3 * NUM_SLOW):
        assert observe(departures, {"actor-3": 9.0 if step % NUM_SLOW else SLOWDOWN}) == {}


def test_equally_slow_nodes_stay() -> None:
    departures = Departures()
    for _ in range(2 * NUM_SLOW):
        assert observe(departures, dict.fromkeys(RANKS, 9.0)) == {}


def test_slower_one_of_two_nodes_leaves() -> None:
    departures = Departures()
    for _ in range(NUM_SLOW):
        departures.observe({"actor-0": 0, "actor-1": 1}, [DeviceState({}, 1.0), DeviceState({}, 2.0)])
    assert departures.reasons().keys() == {1}


def test_speeds_of_one_node_are_not_compared() -> None:
    departures = Departures()
    for _ in range(NUM_SLOW):
        departures.observe({"actor-0": 1, "actor-1": 1}, [DeviceState({}, s) for s in (1.0, 9.0)])
    assert departures.reasons() == {} and departures.slowdown is None
