"""The rule for colocated GPUs of several nodes, held to the plans of refits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megarl.config.load import load
from megarl.planning.shared_gpu_rules import shared_nodes_have_all_weights, stays_in_nodes
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.planner import make_plan
from tests.paths import BASE
from tests.published_models import CONFIGS

LAYOUTS = [
    dict(tp=tp, pp=pp, ep=ep, etp=etp, dp=16 // (tp * pp))
    for tp, pp, ep, etp in product((1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2))
    if 16 // (tp * pp) * tp % (ep * etp) == 0 and (ep > 1 or etp == tp)
]
"""Layouts of 16 ranks."""


@pytest.mark.parametrize(("each", "first"), [(4, 0), (8, 0), (16, 0), (8, 2), (8, 4), (8, 8), (16, 8)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
def test_the_rule_tells_whether_a_plan_leaves_the_nodes(layout: dict, each: int, first: int) -> None:
    """Engines of two ranks, on the GPUs of the trainer's, the first of which is not always the first of a node."""
    keys = [f"actor.layout.{key}={value}" for key, value in layout.items()]
    config = load(BASE, ["model.path=qwen", "data.source=arithmetic", "model.dtype=float32", *keys])
    model = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "num_experts": 8}
    sides = megatron_holders(model, config.actor.layout), vllm_holders(model, 2, 8)
    placed = [[replace(holder, node=i // each, device=i) for i, holder in enumerate(side, first)] for side in sides]
    assert make_plan(*placed).crosses_nodes == (not stays_in_nodes(config.actor.layout, each, first))


def test_a_pipeline_over_colocated_nodes_is_refused_with_the_remedy() -> None:
    keys = [
        "model.path=qwen",
        "data.source=arithmetic",
        "actor.layout.pp=2",
        "actor.layout.dp=8",
        "rollout.replicas=16",
    ]
    message = shared_nodes_have_all_weights(load(BASE, keys), gpus_per_node=8)
    assert "with pp=2, tp=1, ep=1 and etp=1 no node of 8 GPUs has all weights" in message
    assert "set pp=1, and ep x etp to a divisor of 8, let cluster.roles begin with a node, or set" in message
    assert shared_nodes_have_all_weights(load(BASE, [*keys, "cluster.placement=disaggregated"]), 8) is None
    assert shared_nodes_have_all_weights(load(BASE, [*keys, "actor.layout.pp=1", "actor.layout.dp=16"]), 8) is None
