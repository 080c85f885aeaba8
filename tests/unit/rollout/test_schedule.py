"""The schedule of rollouts: ages are bounded, nothing is lost, and nobody waits without need."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.schedule import WINDOW, RolloutSchedule


def play(per_step: int, max_staleness: int, steps: int, rng: random.Random, rounds: int = 1):
    """Plays steps against rollouts that end in a random order. Returns for each step what it took, as the number of the
    group, with the version at which that was begun, and at each take the numbers of those begun then."""
    schedule: RolloutSchedule[list[int]] = RolloutSchedule(per_step, max_staleness)
    taken: list[list[tuple[int, int]]] = []
    choices: list[tuple[int, list[int]]] = []
    number = 0
    for version in range(steps):
        taken.append([])
        for round_number in range(rng.randint(1, rounds)):
            wanted = per_step if round_number == 0 else rng.randint(1, per_step)
            for _ in range(schedule.num_to_begin(wanted, steps - 1 - version)):
                schedule.begin([number, version], version)
                number += 1
            while wanted:
                present = [group[0] for group in schedule.groups]
                group = schedule.take(version, wanted)
                if group is None:
                    schedule.finish(rng.choice(schedule.unfinished))
                else:
                    wanted -= 1
                    taken[-1].append((group[0], group[1]))
                    choices.append((group[0], present))
        for group in rng.sample(schedule.unfinished, rng.randint(0, len(schedule.unfinished))):
            schedule.finish(group)  # while the step trains
    return taken, choices, number, len(schedule)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 12), st.integers(1, 3), st.integers())
def test_no_token_is_too_old_and_each_group_is_taken_once(per_step, max_staleness, steps, rounds, seed):
    taken, choices, number, left = play(per_step, max_staleness, steps, random.Random(seed), rounds)
    everything = [group for step in taken for group, _ in step]
    assert len(set(everything)) == len(everything) and len(everything) + left == number
    assert all(version - begun <= max_staleness for version, step in enumerate(taken) for _, begun in step)
    assert all(present.index(group) < max(WINDOW * per_step, per_step) for group, present in choices)
    if rounds == 1:
        assert left == 0 and all(len(step) == per_step for step in taken), "begun for steps that do not come"


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 12), st.integers(2, 12), st.integers())
def test_what_is_dropped_is_waited_for_when_it_comes_again(per_step, max_staleness, num_ahead, steps, seed):
    """No matter which groups end: a step has all that it takes, nothing waits for what nobody samples, and who was
    dropped once is not dropped again, unless more is dropped than a step takes."""
    rng = random.Random(seed)
    schedule: RolloutSchedule[list[int]] = RolloutSchedule(per_step, max_staleness, num_ahead, drops=True)
    new, again, is_bounded = iter(range(10**6)), [], num_ahead <= per_step * (max_staleness + 1)
    taken, dropped = [], []
    for version in range(steps):
        room = schedule.num_to_wait_for(per_step)
        for place in range(schedule.num_to_begin(per_step, steps - 1 - version)):
            is_again = bool(again)
            schedule.begin([again.pop(0) if is_again else next(new), version], version, again=is_again and place < room)
        for wanted in range(per_step, 0, -1):
            while (group := schedule.take(version, wanted)) is None:
                schedule.finish(rng.choice(schedule.unfinished))
            assert version - group[1] <= max_staleness
            taken.append(group[0])
        for group in rng.sample(schedule.unfinished, rng.randint(0, len(schedule.unfinished))):
            schedule.finish(group)
        expired = [group[0] for group in schedule.expire(version + 1)]
        assert not is_bounded or not set(expired) & set(dropped)
        dropped, again = dropped + expired, expired + again
    assert len(taken) == len(set(taken)) == steps * per_step
    left = {group[0] for group in schedule.groups} | set(again)
    assert set(taken) | left == set(range(next(new))) and not set(taken) & left


@given(st.integers(1, 6), st.integers(1, 12), st.integers())
def test_without_staleness_a_step_takes_what_it_has_begun(per_step, steps, seed):
    taken, *_ = play(per_step, 0, steps, random.Random(seed))
    assert [{group for group, _ in step} for step in taken] == [
        set(range(step * per_step, (step + 1) * per_step)) for step in range(steps)
    ]


def begun(max_staleness: int, per_step: int = 2) -> tuple[RolloutSchedule[str], list[str]]:
    """A schedule at version 0 with all that may be begun there."""
    schedule: RolloutSchedule[str] = RolloutSchedule(per_step, max_staleness)
    names = [chr(ord("a") + i) for i in range(schedule.num_to_begin(per_step, 9))]
    for name in names:
        schedule.begin(name, 0)
    return schedule, names


@pytest.mark.parametrize(("max_staleness", "number"), [(0, 2), (1, 4), (3, 8)])
def test_so_many_are_begun_as_the_bound_allows(max_staleness, number):
    schedule, names = begun(max_staleness)
    assert len(names) == number and schedule.num_to_begin(2, 9) == 0
    assert RolloutSchedule(2, max_staleness).num_to_begin(2, 0) == 2  # nothing ahead of the last step


def test_the_step_takes_what_has_ended_of_the_oldest():
    schedule, _ = begun(1)
    for name in "db":
        schedule.finish(name)
    assert [schedule.take(0, 2), schedule.take(0, 1)] == ["b", "d"]


def test_what_would_be_too_old_next_time_is_waited_for():
    schedule, _ = begun(1)
    for name in "cd":
        schedule.finish(name)
    assert [schedule.take(0, 2), schedule.take(0, 1)] == ["c", "d"]
    for name in "ef":
        schedule.begin(name, 1)
        schedule.finish(name)
    assert schedule.take(1, 2) is None, "a and b are of version 0, and this is the last step that may take them"
    schedule.finish("b")
    assert schedule.take(1, 2) == "b" and schedule.take(1, 1) is None
    schedule.finish("a")
    assert schedule.take(1, 1) == "a"


def test_what_is_far_from_its_turn_is_not_chosen():
    schedule, names = begun(3)
    for name in names[WINDOW * 2 :]:
        schedule.finish(name)
    assert schedule.take(0, 2) is None, "it would prefer what is short"
