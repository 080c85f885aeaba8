"""Routers that replay routes, driven by Megatron's own routing function and compared with plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay

from megarl.core.completion import NO_ROUTE, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import NO_BASELINE
from megarl.data.collate import collate
from megarl.megatron import parallel
from megarl.megatron.model.build import build_chunk, transformer_config
from megarl.megatron.routes import LayerRouter, Routes, install_routers, metrics_of, routed
from megarl.models.folder import read_config
from megarl.models.shape import ModelShape
from tests.packing import packing
from tests.parity import config_of
from tests.routes import random_routes
from tests.samples import training_ref
from tests.tiny_model import write_tiny_experts, write_tiny_model

TOKENS, COUNT, ACTIVE = 6, 8, 4
GROUPS = dict(num_groups=4, group_topk=2)


class Router:
    training = True


def logits() -> torch.Tensor:
    return torch.randn(TOKENS, COUNT, generator=torch.Generator().manual_seed(0), requires_grad=True)


def replayed_experts() -> torch.Tensor:
    """Return int8 [tokens, 1, active]: each router's least preferred experts."""
    return logits().detach().argsort(dim=1)[:, None, :ACTIVE].to(torch.int8)


def replaying(experts: torch.Tensor | None, layer: int = 0, router: Router | None = None) -> LayerRouter:
    replay = LayerRouter(router or Router(), layer, COUNT)
    replay.begin(Routes(experts, torch.ones(TOKENS, dtype=torch.bool)))
    return replay


def test_scores_of_replayed_experts_have_a_gradient():
    """Group-limited sigmoid scores, as in DeepSeek-V3: the router masks the scores of groups it did not choose."""
    actual, plain, weights = logits(), logits(), torch.rand(TOKENS, COUNT)
    experts = replayed_experts()
    probs, chosen = topk_routing_with_score_function(
        actual, ACTIVE, score_function="sigmoid", router_replay=replaying(experts), **GROUPS
    )
    numbers = experts[:, 0].long()
    assert torch.equal(chosen, torch.zeros(TOKENS, COUNT).scatter(1, numbers, 1).bool())
    scores = plain.sigmoid().gather(1, numbers)
    expected = torch.zeros(TOKENS, COUNT).scatter(1, numbers, scores / (scores.sum(1, keepdim=True) + 1e-20))
    torch.testing.assert_close(probs, expected)
    (probs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(actual.grad, plain.grad)
    assert (actual.grad.gather(1, numbers) != 0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_token_without_route_uses_the_routers_choice(score_function):
    experts = replayed_experts()
    experts[2] = NO_ROUTE
    probs, chosen = topk_routing_with_score_function(
        logits(), ACTIVE, score_function=score_function, router_replay=replaying(experts)
    )
    own_probs, own = topk_routing_with_score_function(logits(), ACTIVE, score_function=score_function)
    assert torch.equal(chosen[2], own[2]) and torch.equal(probs[2], own_probs[2])
    others = [0, 1, 3, 4, 5]
    assert torch.equal(
        chosen[others], torch.zeros(TOKENS, COUNT).scatter(1, replayed_experts()[:, 0].long(), 1).bool()[others]
    )


def test_no_routes_change_nothing():
    actual = topk_routing_with_score_function(
        logits(), ACTIVE, score_function="sigmoid", router_replay=replaying(None), **GROUPS
    )
    own = topk_routing_with_score_function(logits(), ACTIVE, score_function="sigmoid", **GROUPS)
    assert all(map(torch.equal, actual, own))


def test_recomputation_uses_routes_of_its_microbatch():
    """Two forward passes precede the first backward pass, as in a pipeline. Scoring passes are not recomputed."""
    router = Router()
    replay, several = (
        LayerRouter(router, 0, COUNT),
        [replayed_experts(), replayed_experts().roll(1, 0), replayed_experts().roll(2, 0)],
    )

    def choose() -> torch.Tensor:
        return topk_routing_with_score_function(logits(), ACTIVE, router_replay=replay)[1]

    def forward(number: int) -> torch.Tensor:
        replay.begin(Routes(several[number], torch.ones(TOKENS, dtype=torch.bool)))
        with torch.no_grad():
            chosen = choose()
        replay.end()
        return chosen

    router.training = False
    forward(2)
    router.training = True
    first, second = forward(0), forward(1)
    assert torch.equal(choose(), first)
    third = forward(2)
    assert torch.equal(choose(), second) and torch.equal(choose(), third)
    assert replay.is_done
    assert not torch.equal(first, second)


def test_metrics_match_worked_example():
    """Two layers of two experts. The trainer would have routed 2 of 8 replayed tokens elsewhere."""
    metrics = metrics_of(torch.tensor([[6, 2, 1, 4], [5, 3, 1, 4]]), "policy")
    assert metrics["policy/max_vio"].value == pytest.approx((0.5 + 0.25) / 2)
    assert metrics["policy/routes_differ"].value == 0.25
    assert metrics_of(torch.tensor([[6, 2, 0, 0]]), "policy").keys() == {"policy/max_vio"}
    assert metrics_of(torch.zeros(1, 4, dtype=torch.int64), "policy") == {}


def pack(experts: np.ndarray, multiple: int):
    count = len(experts)
    sample = Sample(
        "0",
        Prompt("0", "", [5]),
        [7] * (count - 1),
        [-1.0] * (count - 1),
        [True] * (count - 1),
        (VersionRun(0, count - 1),),
        "stop",
        "",
        routes=experts,
    )
    return collate([training_ref(sample, 0.0, NO_BASELINE, 1.0)], packing(pack_multiple=multiple))


@pytest.mark.parametrize("tokens", [5, 7, 8])
def test_sequence_parallel_ranks_have_their_tokens_routes(tmp_path, tokens):
    """The pack may end in padding, which has no routes."""
    folder = write_tiny_experts(tmp_path)
    batch, parts = pack(random_routes(folder, tokens, seed=0), multiple=4), []
    layout = config_of(folder, "actor.layout={tp: 2, sequence_parallel: true}").actor.layout
    for rank in range(2):
        with parallel.simulated_rank(layout, rank):
            parts.append(Routes.of(batch, torch.arange(8), sequence_parallel=True))
    assert [len(part.experts) for part in parts] == [4, 4]
    whole = torch.cat([part.experts for part in parts])
    assert torch.equal(whole[:tokens], torch.from_numpy(random_routes(folder, tokens, seed=0)))
    assert (whole[tokens:] == NO_ROUTE).all()
    assert torch.cat([part.is_sampled for part in parts]).tolist() == [True] * tokens + [False] * (8 - tokens)


FIRST_DENSE = dict(
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=8,
    intermediate_size=96,
    max_position_embeddings=64,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
)


@pytest.mark.parametrize("dense", [[0], [0, 1, 2], [3]])
def test_dense_layers_do_not_shift_expert_layers(tmp_path, dense):
    """Every expert layer has its own routes, in a model of 8 layers over two stages with two virtual stages each."""
    folder = write_tiny_model(tmp_path, "qwen3_moe", **FIRST_DENSE, mlp_only_layers=dense)
    config, hf_config = config_of(folder, "actor.layout={pp: 2, vpp: 2}"), read_config(folder)
    route_index = {}
    for rank in range(2):
        with parallel.simulated_rank(config.actor.layout, rank):
            megatron_config = transformer_config(config.actor, hf_config, torch.float32)
            for stage in range(2):
                chunk = build_chunk(megatron_config, hf_config, stage, 64)
                install_routers(chunk, ModelShape.of(hf_config))
                for layer in chunk.decoder.layers:
                    if hasattr(layer.mlp, "router"):
                        route_index[layer.layer_number - 1] = layer.mlp.router.router_replay.layer
    assert route_index == {layer: index for index, layer in enumerate(i for i in range(8) if i not in dense)}


def test_models_in_one_process_do_not_share_routes(tmp_path):
    """An actor and a critic. Megatron's process-wide registry of routers stays empty."""
    folder = write_tiny_experts(tmp_path)
    config, hf_config = config_of(folder), read_config(folder)
    with parallel.simulated_rank(config.actor.layout, 0):
        megatron_config = transformer_config(config.actor, hf_config, torch.float32)
        actor, critic = (build_chunk(megatron_config, hf_config, 0, 64) for _ in range(2))
    for model in (actor, critic):
        install_routers(model, ModelShape.of(hf_config))
    [actor_router], [critic_router] = actor.layer_routers, critic.layer_routers
    routes = Routes(torch.tensor([[[2, 3]]] * TOKENS, dtype=torch.int8), torch.ones(TOKENS, dtype=torch.bool))
    none = Routes(None, routes.is_sampled)
    scores = logits()[:, :4]

    def choices(router: LayerRouter) -> torch.Tensor:
        return topk_routing_with_score_function(scores, 2, router_replay=router)[1]

    with routed(actor, routes), routed(critic, none):
        assert choices(actor_router)[:, 2:].all()
        assert torch.equal(choices(critic_router), topk_routing_with_score_function(scores, 2)[1])
    assert RouterReplay.global_router_replay_instances == []
