from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe

APART = "cluster.placement=disaggregated"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.roles.actor=0-1"],
            "cluster.roles: no devices are set for rollout. Fix: set devices for all of actor, rollout",
        ),
        (
            [APART, "cluster.roles={actor: 0-1, critic: 0-1, rollout: 2}"],
            (
                "cluster.roles: the run has no critic. Fix: set devices for all of actor, rollout and no other role, "
                "or for no role"
            ),
        ),
        (
            [APART, "cluster.roles={actor: 0-3, rollout: 4}"],
            "cluster.roles.actor=0-3: the range has 4 devices, but actor.layout has 2 ranks. Fix: set "
            "cluster.roles.actor=0-1, or change actor.layout",
        ),
        (
            [APART, "cluster.roles={actor: 1-0, rollout: 4}"],
            "cluster.roles.actor=1-0: the range has 0 devices, but actor.layout has 2 ranks. Fix: set",
        ),
        (
            [APART, "cluster.roles={actor: 0-1, rollout: 2-3}"],
            "cluster.roles.rollout=2-3: the range has 2 devices, but rollout.replicas x",
        ),
        (
            [APART, "cluster.roles={actor: 0-1, rollout: 1}"],
            "cluster.roles.rollout=1: disaggregated engines cannot share devices with models, but",
        ),
        (
            ["cluster.roles={actor: 0-1, rollout: 1}"],
            "cluster.roles.rollout=1: colocated engines must start on the actor's first device, but",
        ),
        (["cluster.roles={actor: first, rollout: 1}"], "cluster.roles.actor=first"),
        (
            [APART, "cluster.roles={actor: nodes 0-2, rollout: 9}"],
            "cluster.roles.actor=nodes 0-2: the 2 ranks of actor.layout cannot be spread evenly over 3 nodes",
        ),
        (
            [APART, "cluster.roles={actor: node 0, rollout: node 2}"],
            "cluster.roles: roles placed by nodes need the same number of ranks per node, but the numbers are actor "
            "2, rollout 1. Fix: change",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.roles={actor: 0-1, rollout: 0}"],
        [APART, "cluster.roles={actor: 1-2, rollout: 0}"],
        [APART, GAE, "cluster.roles={actor: 0-1, critic: 1, rollout: 2}"],
        [APART, "cluster.roles={actor: nodes 0-1, rollout: node 2}"],
        [APART, "cluster.roles={actor: node 0, rollout: 2}"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
