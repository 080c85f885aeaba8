"""GiGPO's advantages of turns: worked examples, a loop over pairs of turns, and invariances."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages.gigpo import turn_advantages
from megarl.algorithms.baselines import Member, Turn
from megarl.algorithms.registry import ESTIMATORS

SPEC = ESTIMATORS["gigpo"]
TURNS = st.lists(st.builds(Turn, st.integers(0, 2), st.integers(-2, 2).map(float)), max_size=5)
GROUPS = st.lists(TURNS, min_size=2, max_size=4)


def compared(group: Sequence[Sequence[Turn]], **options: object) -> list[list[float]]:
    return SPEC.turn_advantages(group, dict(SPEC.options) | options)


def test_turns_in_equal_states_are_compared():
    """Both rollouts start in state 7. Their returns are 0 + ½·1 and 0 + ½·0 + ¼·2. State 8 has the returns 1 and 2,
    and state 9 has one turn, which cannot be compared."""
    group = [[Turn(7, 0.0), Turn(8, 1.0)], [Turn(7, 0.0), Turn(9, 0.0), Turn(8, 2.0)]]
    actual = compared(group, std="none", turn_gamma=0.5, turn_weight=3.0)
    assert actual == [pytest.approx([0.0, -1.5]), pytest.approx([0.0, 0.0, 1.5])]
    scaled = compared(group, std="sample", std_epsilon=0.5, turn_gamma=0.5)
    assert scaled == [pytest.approx([0.0, -0.5 / (0.5**0.5 + 0.5)]), pytest.approx([0, 0, 0.5 / (0.5**0.5 + 0.5)])]


def test_state_may_recur_within_a_rollout():
    """The returns in the state are 1 and 1 of the first rollout, and 4 of the second."""
    assert compared([[Turn(1, 0.0), Turn(1, 1.0)], [Turn(1, 4.0)]], std="none", turn_gamma=1.0) == [[-1, -1], [2]]


def test_group_of_one_rollout_has_no_turn_advantage():
    assert compared([[Turn(1, 0.0), Turn(1, 1.0)]]) == [[0.0, 0.0]]


def test_other_estimators_have_no_turn_advantages():
    assert ESTIMATORS["grpo"].turn_advantages([[Turn(1, 0.0)], []], ESTIMATORS["grpo"].options) == [[], []]


def test_rollouts_are_compared_as_in_grpo():
    group = [Member(1.0, 3), Member(0.0, 1), Member(4.0, 2)]
    for std in ("sample", "population", "none"):
        grpo, gigpo = (s.baselines(group, dict(s.options) | {"std": std}) for s in (ESTIMATORS["grpo"], SPEC))
        assert grpo == gigpo


@given(group=GROUPS, gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_advantages_match_a_loop_over_turns(group, gamma):
    flat = [
        (turn.state, sum(gamma**n * later.reward for n, later in enumerate(turns[k:])))
        for turns in group
        for k, turn in enumerate(turns)
    ]
    expected = []
    for state, own in flat:
        same = [discounted for other, discounted in flat if other == state]
        deviation = stdev(same) if len(same) > 1 else 0.0
        expected.append((own - fmean(same)) / (deviation + 0.1))
    actual = turn_advantages(group, "sample", 0.1, gamma, 1.0)
    assert [len(of_rollout) for of_rollout in actual] == list(map(len, group))
    assert [a for of_rollout in actual for a in of_rollout] == pytest.approx(expected, abs=1e-9)


@given(group=GROUPS, order=st.randoms(use_true_random=False))
def test_turn_advantages_ignore_names_of_states_and_order(group, order):
    plain = compared(group)
    renamed = [[Turn(10 - turn.state, turn.reward) for turn in turns] for turns in group]
    assert compared(renamed) == plain
    places = list(range(len(group)))
    order.shuffle(places)
    moved = compared([group[i] for i in places])
    for i, of_rollout in zip(places, moved, strict=True):
        assert of_rollout == pytest.approx(plain[i], abs=1e-9)
