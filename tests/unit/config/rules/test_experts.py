from __future__ import annotations

import pytest

from megarl.models.rules import check_model
from tests.unit.config.rules.recipes import errors, recipe
from tests.unit.models.test_rules import SMOLLM2

REPLAY = "actor.experts.replay_routes=true"


def test_route_replay_requires_sampled_data():
    lines = errors(REPLAY, "data.format=messages", "algorithm.objective.name=sft", "rewards.functions=[]")
    [error] = [line for line in lines if line.startswith("actor.experts")]
    assert error.startswith("actor.experts.replay_routes=true: has no effect unless data.format=prompts. Fix")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("moe_router_fusion: true", "the fused router selects and weights experts in one kernel"),
        ("moe_router_load_balancing_type: sinkhorn", "sinkhorn balancing selects its own experts"),
        ("cuda_graph_impl: local", "a CUDA graph replays the routes of the first microbatch"),
    ],
)
def test_router_settings_that_ignore_routes_are_rejected(override, reason):
    key = f"actor.megatron_overrides.model={{{override}}}"
    [error] = errors(REPLAY, key)
    assert error.startswith(f"actor.megatron_overrides.model.{override.replace(': ', '=')}: {reason}, ")
    recipe(key)


def test_route_replay_determines_the_engines_cache():
    key = "rollout.vllm_overrides={enable_prefix_caching: false}"
    [error] = errors(REPLAY, key)
    assert error.startswith("rollout.vllm_overrides.enable_prefix_caching=false: megarl sets this argument")
    recipe(key)


def test_expert_keys_are_rejected_for_dense_models():
    with pytest.raises(ValueError) as error:
        check_model(recipe(REPLAY, "actor.experts.router=frozen"), SMOLLM2)
    assert str(error.value).splitlines() == [
        "actor.experts.replay_routes=true: model.path=smollm2 has no experts. "
        "Fix: set actor.experts.replay_routes=false",
        "actor.experts.router=frozen: model.path=smollm2 has no routers. Fix: set actor.experts.router=free",
    ]
