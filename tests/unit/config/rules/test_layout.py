from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.layout.sequence_parallel=true"],
            "actor.layout.sequence_parallel=true: sequence parallelism shards over",
        ),
        (
            ["actor.layout.pp=1"],
            (
                "actor.layout.last_stage_layers=13: actor.layout.pp=1 has a single pipeline stage. Fix: set "
                "actor.layout.last_stage_layers=null"
            ),
        ),
        (["actor.layout={pp: 1, vpp: 2, last_stage_layers: null}"], "actor.layout.vpp=2: virtual stages interleave"),
        (
            ["actor.layout.ep=3", "actor.layout.dp=4"],
            "actor.layout.ep=3: a pipeline stage has tp x cp x dp = 1 x 1 x 4 = 4 ranks, which are not divisible by "
            "etp x ep = 1 x 3 = 3 (4 / 3 = 1.333). Fix: set actor.layout.ep to 1, 2 or 4",
        ),
        (
            ["actor.layout={tp: 2, etp: 1}"],
            "actor.layout.etp=1: without expert parallelism (actor.layout.ep=1), experts are sharded like the other "
            "layers (actor.layout.tp=2). Fix: set actor.layout.etp=null, or raise actor.layout.ep",
        ),
        ([GAE, "critic.layout.vpp=2"], "critic.layout.vpp=2: virtual stages interleave the layers of several"),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
        ["actor.layout.pp=1", "actor.layout.last_stage_layers=null"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)


def test_layout_rules_apply_to_the_reward_model() -> None:
    (line,) = errors("reward_model.path=rm", "reward_model.layout.vpp=2")
    assert line.startswith("reward_model.layout.vpp=2: virtual stages interleave")
    recipe("reward_model.path=rm", "rewards.functions=[]")
