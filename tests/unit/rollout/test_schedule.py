"""The rollout schedule bounds staleness, loses no group and does not wait needlessly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.schedule import WINDOW, RolloutSchedule


def simulate(per_step: int, max_staleness: int, steps: int, rng: random.Random, rounds: int = 1):
    """Simulate steps with rollouts that finish in random order.

    Return, per step, the taken groups as (number, version at which it was started); per take, the taken number and the
    numbers of all groups in the schedule at that time; the number of started groups; and the number of groups left.
    """
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
                present = sorted(group[0] for group in [*schedule.finished, *schedule.unfinished])
                group = schedule.take(version, wanted)
                if group is None:
                    schedule.finish(rng.choice(schedule.unfinished))
                else:
                    wanted -= 1
                    taken[-1].append((group[0], group[1]))
                    choices.append((group[0], present))
        for group in rng.sample(schedule.unfinished, rng.randint(0, len(schedule.unfinished))):
            schedule.finish(group)  # finish some groups, as during training
    return taken, choices, number, len(schedule)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 12), st.integers(1, 3), st.integers())
def test_staleness_is_bounded_and_groups_are_taken_once(per_step, max_staleness, steps, rounds, seed):
    taken, choices, number, left = simulate(per_step, max_staleness, steps, random.Random(seed), rounds)
    everything = [group for step in taken for group, _ in step]
    assert len(set(everything)) == len(everything) and len(everything) + left == number
    assert all(version - start <= max_staleness for version, step in enumerate(taken) for _, start in step)
    assert all(present.index(group) < max(WINDOW * per_step, per_step) for group, present in choices)
    if rounds == 1:
        assert left == 0 and all(len(step) == per_step for step in taken), (
            "groups were started for steps that do not exist"
        )


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 12), st.integers(2, 12), st.integers())
def test_restarted_groups_are_not_dropped_again(per_step, max_staleness, num_ahead, steps, seed):
    """Whichever groups finish, each step gets all its groups and waits only for groups that are being sampled.

    A dropped group is not dropped again, unless more groups are dropped than a step takes.
    """
    rng = random.Random(seed)
    schedule: RolloutSchedule[list[int]] = RolloutSchedule(per_step, max_staleness, num_ahead, drops=True)
    new, again, is_bounded = iter(range(10**6)), [], num_ahead <= per_step * (max_staleness + 1)
    taken, dropped = [], []
    for version in range(steps):
        room = schedule.num_to_wait_for(per_step)
        for place in range(schedule.num_to_begin(per_step, steps - 1 - version)):
            is_again = bool(again)
            schedule.begin(
                [again.pop(0) if is_again else next(new), version], version, is_restart=is_again and place < room
            )
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
    left = {group[0] for group in [*schedule.finished, *schedule.unfinished]} | set(again)
    assert set(taken) | left == set(range(next(new))) and not set(taken) & left


@given(st.integers(1, 6), st.integers(1, 12), st.integers())
def test_without_staleness_steps_take_their_own_groups(per_step, steps, seed):
    taken, *_ = simulate(per_step, 0, steps, random.Random(seed))
    assert [{group for group, _ in step} for step in taken] == [
        set(range(step * per_step, (step + 1) * per_step)) for step in range(steps)
    ]


def started(max_staleness: int, per_step: int = 2) -> tuple[RolloutSchedule[str], list[str]]:
    """Return a schedule at version 0 with all groups that may be started, and their names."""
    schedule: RolloutSchedule[str] = RolloutSchedule(per_step, max_staleness)
    names = [chr(ord("a") + i) for i in range(schedule.num_to_begin(per_step, 9))]
    for name in names:
        schedule.begin(name, 0)
    return schedule, names


@pytest.mark.parametrize(("max_staleness", "number"), [(0, 2), (1, 4), (3, 8)])
def test_num_to_begin_respects_the_staleness_bound(max_staleness, number):
    schedule, names = started(max_staleness)
    assert len(names) == number and schedule.num_to_begin(2, 9) == 0
    assert RolloutSchedule(2, max_staleness).num_to_begin(2, 0) == 2  # the last step starts no groups ahead


def test_step_takes_the_oldest_finished_groups():
    schedule, _ = started(1)
    for name in "db":
        schedule.finish(name)
    assert [schedule.take(0, 2), schedule.take(0, 1)] == ["b", "d"]


def test_step_waits_for_groups_that_would_become_too_old():
    schedule, _ = started(1)
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


def test_groups_outside_the_window_are_not_chosen():
    schedule, names = started(3)
    for name in names[WINDOW * 2 :]:
        schedule.finish(name)
    assert schedule.take(0, 2) is None, "the step would favor short responses"
