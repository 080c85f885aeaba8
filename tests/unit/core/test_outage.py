"""Pauses while a resource outside the run is unavailable."""

from __future__ import annotations

from itertools import islice

from megarl.core.outage import LONGEST_PAUSE_S, Outage, pauses


def test_pauses_grow_and_add_up_to_the_limit():
    assert list(pauses(100)) == [1, 2, 4, 8, 16, 30, 30, 9]
    assert sum(pauses(300)) == 300 and max(pauses(300)) == LONGEST_PAUSE_S
    assert list(pauses(0)) == []


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def waited(outage: Outage, clock: Clock) -> float:
    """Return how many seconds one call waits for a service that does not recover."""
    begin = clock.now
    for pause in outage.begin_call():
        if pause is None:
            return clock.now - begin
        clock.now += pause
    raise AssertionError


def test_calls_share_the_limit_until_one_succeeds():
    clock = Clock()
    outage = Outage(300, clock)
    assert waited(outage, clock) == 300
    assert [waited(outage, clock) for _ in range(1000)] == [0] * 1000
    outage.end()
    assert waited(outage, clock) == 300


def test_successes_of_other_calls_do_not_prolong_a_call():
    clock = Clock()
    outage = Outage(300, clock)
    for pause in islice(outage.begin_call(), 1000):
        outage.end()
        if pause is None:
            break
        clock.now += pause
    assert pause is None and clock.now - 50 == 300
