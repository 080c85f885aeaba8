from __future__ import annotations

import pytest

from megarl.models.rules import check_model
from tests.unit.config.rules.recipes import errors, recipe
from tests.unit.models.rules.model_configs import SMOLLM2

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


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("enable_prefix_caching: false", "vLLM returns routes only with the prefix cache on GPUs"),
        ("enable_dbo: true", "selects vLLM's Model Runner V1, but only V2 returns routes"),
        ("ubatch_size: 2", "selects vLLM's Model Runner V1, but only V2 returns routes"),
        ("decode_context_parallel_size: 2", "an engine with context parallelism does not return routes"),
        ("kv_transfer_config: {}", "an engine does not return routes of a transferred KV cache"),
    ],
)
def test_engines_that_cannot_return_routes_are_rejected(override, reason):
    key = f"rollout.vllm_overrides={{{override}}}"
    [error] = errors(REPLAY, key)
    assert error.startswith(f"rollout.vllm_overrides.{override.replace(': ', '=')}: {reason}")
    recipe(key)


def test_pipeline_parallel_engines_are_rejected_with_route_replay():
    [error] = errors(REPLAY, "rollout.vllm_overrides={pipeline_parallel_size: 2}")
    assert error.startswith("rollout.vllm_overrides.pipeline_parallel_size=2: ")


def test_overrides_with_which_engines_return_routes_are_accepted():
    recipe(REPLAY, "rollout.vllm_overrides={enable_dbo: false, decode_context_parallel_size: 1, block_size: 32}")


def test_expert_keys_are_rejected_for_dense_models():
    with pytest.raises(ValueError) as error:
        check_model(recipe(REPLAY, "actor.experts.router=frozen"), SMOLLM2)
    assert str(error.value).splitlines() == [
        "actor.experts.replay_routes=true: model.path=smollm2 has no experts. "
        "Fix: set actor.experts.replay_routes=false",
        "actor.experts.router=frozen: model.path=smollm2 has no routers. Fix: set actor.experts.router=free",
    ]
