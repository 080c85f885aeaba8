"""The rule for colocated GPUs on several nodes, checked against refit plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megarl.config.load import load
from megarl.config.rules.shared_gpu import stays_in_nodes, weights_travel
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from tests.marks import each_value
from tests.paths import BASE
from tests.published_models import CONFIGS

LAYOUTS = [
    dict(tp=tp, pp=pp, ep=ep, etp=etp, dp=16 // (tp * pp))
    for tp, pp, ep, etp in product((1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2))
    if 16 // (tp * pp) * tp % (ep * etp) == 0 and (ep > 1 or etp == tp)
]
"""Layouts of 16 ranks."""


DAILY = LAYOUTS[::3]


def cases(places: Sequence[tuple[int, int]]) -> list[Any]:
    """Return all pairs of a layout and a place. A few cases cover each place and each daily layout."""
    others = product((layout for layout in LAYOUTS if layout not in DAILY), places)
    return [*each_value(DAILY, places), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in others)]


def label(value: dict | tuple[int, int]) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "-".join(map(str, value))


@pytest.mark.parametrize(
    ("layout", "place"), cases([(4, 0), (8, 0), (16, 0), (8, 2), (8, 4), (8, 8), (16, 8)]), ids=label
)
def test_rule_predicts_whether_a_plan_crosses_nodes(layout: dict, place: tuple[int, int]) -> None:
    """Engines of two ranks share the trainer's GPUs, which do not always start at the first GPU of a node.

    place: the number of GPUs per node, and the first GPU.
    """
    each, first = place
    keys = [f"actor.layout.{key}={value}" for key, value in layout.items()]
    config = load(BASE, ["model.path=qwen", "data.source=arithmetic", "model.dtype=float32", *keys])
    model = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "num_experts": 8}
    sides = megatron_holders(model, config.actor.layout), vllm_holders(model, 2, 8)
    placed = [[replace(holder, node=i // each, device=i) for i, holder in enumerate(side, first)] for side in sides]
    crosses = make_plan(*placed).crosses_nodes
    assert stays_in_nodes(config.actor.layout, each, first) == (not crosses)
    if first == 0:
        assert weights_travel(config, each) == crosses


@pytest.mark.parametrize(("layout", "place"), cases([*product((2, 4, 8), (2, 4))]), ids=label)
def test_no_gpu_sends_to_itself_if_engines_read_locally(layout: dict, place: tuple[int, int]) -> None:
    """NCCL cannot send from a GPU to itself. The node-local and remote parts make up the plan. Only the remote part is
    sent and ordered.

    place: the number of GPUs per node, and the engines' tensor-parallel size.
    """
    each, tp = place
    keys = [f"actor.layout.{key}={value}" for key, value in layout.items()]
    config = load(BASE, ["model.path=qwen", "data.source=arithmetic", "model.dtype=float32", *keys])
    model = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "num_experts": 8}
    sides = megatron_holders(model, config.actor.layout), vllm_holders(model, tp, 16 // tp)
    placed = [[replace(holder, node=i // each, device=i) for i, holder in enumerate(side)] for side in sides]
    plan = ordered(make_plan(*placed))
    device = dict(zip(range(32), plan.devices, strict=True))
    for hop in plan.remote.order:
        assert device[hop.link.source] != device[hop.link.destination]
        bucket = plan.remote.buckets[hop.bucket]
        assert (hop.link in bucket.links) != (hop.link in bucket.forwards)
    sent = sum(len(bucket.links) + len(bucket.forwards) for bucket in plan.remote.buckets)
    assert len(plan.remote.order) == sent and not plan.node_local.order
    for name in plan.destinations:
        parts = (*plan.node_local.into(name).copies, *plan.remote.into(name).copies)
        assert sorted(parts) == sorted(plan.into(name).copies)
        node = plan.nodes[plan.holders.index(name)]
        assert {plan.nodes[plan.holders.index(copy.source)] for copy in plan.node_local.into(name).copies} <= {node}
