"""Estimators, objectives, aggregations and forms of the KL combine freely. In any layout, loss and gradients match
plain Hugging Face and torch, which process one sample at a time.

Each estimator is paired with each objective, and both with every aggregation and every correction. Each form of the KL
occurs in at least two cases. `make test` runs every fifth case.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import get_args

import pytest

from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.config.algorithm_schema import Aggregation
from tests import estimator_reference, objective_cases
from tests import objective_reference as plain
from tests.closeness import Expected
from tests.estimator_reference import AVERAGE, GREEDY, Divergence
from tests.objective_cases import KL, LAYOUTS, Case, Results, World, check, expected

ESTIMATOR_CASES = estimator_reference.CASES
FIRST_CASES: dict[str, str] = {}
for title, of_objective in objective_cases.CASES.items():
    FIRST_CASES.setdefault(of_objective.name, title)
OBJECTIVE_TITLES = list(FIRST_CASES.values())
"""The first case of each objective."""


CORRECTIONS: list[tuple[str, plain.Factor]] = [
    ("", plain.no_factor),
    ("weight: token, weight_limit: 1.2", plain.truncated(plain.token_level, 1.2)),
    ("weight: token, weight_limit: 1.2, weight_floor: 0.9", plain.truncated(plain.token_level, 1.2, 0.9)),
    ("weight: sequence, weight_limit: 1.5", plain.truncated(plain.sequence_level, 1.5)),
    ("weight: geometric, weight_limit: null", plain.truncated(plain.geometric)),
    ("weight: token, weight_limit: null, mask: token, mask_low: 0.7, mask_high: 1.5", plain.icepop),
    ("mask: sequence, mask_low: 0.5, mask_high: 2", plain.masked(plain.sequence_level, 0.5, 2)),
    ("mask: geometric, mask_low: 0.97, mask_high: 1.2", plain.masked(plain.geometric, 0.97, 1.2)),
]
KLS = [
    None,
    *product(("loss", "whole", "reward_to_go"), ("token", "sequence"), ("k1", "k2", "k3", "abs"), (False, True)),
]
"""Where the KL is placed (loss or reward), its level, its estimator, and whether its gradient is straight-through."""


def case(world: World, i: int, j: int) -> Case:
    """Return the case of estimator i and objective j.

    Along a long enough row or column, i + j takes every value modulo the number of aggregations (6), and i + 3j takes
    every value modulo the number of corrections (8).
    """
    estimator_case = list(ESTIMATOR_CASES.values())[i]
    keys, estimate, given = estimator_case
    correction, factor = CORRECTIONS[(i + 3 * j) % len(CORRECTIONS)]
    aggregations = get_args(Aggregation)
    with_objective = replace(
        objective_cases.CASES[OBJECTIVE_TITLES[j]],
        aggregation=aggregations[(i + j) % len(aggregations)],
        correction=correction,
        factor=factor,
        estimator=f"estimator: {keys}",
        given=given,
    )
    form = KLS[(len(OBJECTIVE_TITLES) * i + j) % len(KLS)]
    if form is None:
        return replace(with_objective, kl="", divergence=None, reported=None, estimate=estimate(Divergence(), world))
    placed, level, estimator, straight_through = form
    in_reward, options = placed != "loss", ESTIMATORS[estimator_case.name].options
    if in_reward and ("credit" in keys or "credit" not in options):
        placed = "reward_to_go"  # the estimator or the case's keys determine the credit
    elif in_reward:
        with_objective = replace(with_objective, estimator=f"estimator: {keys}, credit: {placed}")
    placement, where = ("reward", f"reward_{placed.removeprefix('reward_')}") if in_reward else ("loss", "loss")
    divergence = plain.divergence(estimator, level, straight_through)
    name = f"kl/{where}_{level}_{estimator}{'_straight_through' if straight_through else ''}"
    return replace(
        with_objective,
        reported=(name, (lambda r: divergence(replace(r, now=r.old))) if in_reward else divergence),
        kl=f"placement: {placement}, level: {level}, estimator: {estimator}, "
        f"straight_through: {str(straight_through).lower()}",
        divergence=None if in_reward else divergence,
        estimate=estimate(Divergence(KL, estimator, level, placed) if in_reward else Divergence(), world),
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World.make(tmp_path_factory.mktemp("experts"))


def make_cases(world: World, spacing: int) -> dict[str, Case]:
    """Return every pair of estimator and objective if `spacing` is 1, or every fifth pair if it is 5."""
    pairs = product(enumerate(ESTIMATOR_CASES), enumerate(OBJECTIVE_TITLES))
    return {
        f"{estimator} with {objective}": case(world, i, j)
        for (i, estimator), (j, objective) in pairs
        if (2 * i + j) % spacing == 0
    }


def test_cases_cover_every_pair(world):
    cases = make_cases(world, 1)
    assert {case.name for case in ESTIMATOR_CASES.values()} == set(ESTIMATORS)
    assert {c.name for c in cases.values()} == {
        name for name, spec in OBJECTIVES.items() if spec.is_policy_objective and "tokens" in spec.actions
    }
    choices = {"aggregation": get_args(Aggregation), "correction": CORRECTIONS}
    for (axis, titles), other in product(((0, ESTIMATOR_CASES), (-1, OBJECTIVE_TITLES)), choices):
        pairs = {(name.split(" with ")[axis], getattr(c, other)) for name, c in cases.items()}
        assert len(pairs) == len(titles) * len(choices[other]), (axis, other)
    assert len({c.reported and c.reported[0] for c in cases.values()}) == len(KLS)


def test_every_fifth_case_covers_every_choice(world):
    """The KL's placement, level, estimator and straight-through gradient occur in all pairwise combinations."""
    cases, every_case = (make_cases(world, spacing).values() for spacing in (5, 1))

    def choices(case: Case) -> set[tuple[str, ...]]:
        estimator = case.estimator.partition(", credit: ")[0]
        kl = combinations(case.kl.split(", "), 2)
        return {("objective", case.name), ("estimator", estimator), (case.aggregation,), (case.correction,), *kl}

    assert set().union(*map(choices, cases)) == set().union(*map(choices, every_case))


def test_every_fifth_case_equals_single_samples(world):
    cases = make_cases(world, 5)
    check(world, cases, expected(world, cases), "CP2", GREEDY, AVERAGE)


@pytest.fixture(scope="module")
def single_samples(world) -> dict[str, Expected[Results]]:
    return expected(world, make_cases(world, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_single_samples(world, single_samples, layout):
    check(world, make_cases(world, 1), single_samples, layout, GREEDY, AVERAGE)
