"""Replayed routes give the same result in every layout: that of a plain transformers model whose routers follow
them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.core.completion import NO_ROUTE
from megarl.core.sample import Sample
from megarl.megatron.workers.actor import ActorWorker
from tests.closeness import Expected, float64
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Outcome,
    RankResult,
    assert_same_training,
    branching_group,
    canonical,
    config_of,
    own_batch,
    plain_outcome,
    random_groups,
    train,
)
from tests.routes import Replayed, ReplayedGrpo, with_routes
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_model

KL = 0.05
LAYOUTS = {
    "one process": "dp: 1",
    "TP2, SP, EP2": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "PP2, VPP2, EP2": "dp: 2, pp: 2, vpp: 2, ep: 2",
    "CP2, TP2, SP": "cp: 2, tp: 2, sequence_parallel: true",
    "CP2, EP2": "cp: 2, ep: 2",
    "PP2": "pp: 2",
}
VARIANTS = {
    "packed": (["actor.tokens_per_microbatch=64"], {}),
    "nothing shared": ([], dict(shares_prompts=False)),
    "padded": ([], dict(shares_prompts=False, document_multiple=64)),
    "full recompute": (["actor.recompute=full"], {}),
    "selective recompute": (["actor.recompute=selective", "actor.tokens_per_microbatch=256"], {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose second layer is dense."""
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), num_layers=4, vocab_size=SHARDED_VOCAB)


@cache
def updates(folder: Path) -> list:
    """Return two updates. In the second, the policy differs from its reference."""
    return [
        with_routes(folder, [*random_groups(seed, SHARDED_VOCAB), branching_group(seed, SHARDED_VOCAB)])
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReplayedGrpo:
    return ReplayedGrpo(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def outcome(folder: Path, reference: ReplayedGrpo) -> Expected[Outcome]:
    with float64():
        exact = plain_outcome(ReplayedGrpo(folder, lr=LR, eps=EPS, temperature=TEMPERATURE), updates(folder), KL)
    return Expected(exact, plain_outcome(reference, updates(folder), KL))


@cache
def trained(folder: Path, layout: str, variant: str) -> list[RankResult]:
    keys, packing = VARIANTS[variant]
    config = config_of(folder, f"algorithm.kl.coefficient={KL}", f"actor.layout={{{LAYOUTS[layout]}}}", *keys)
    return run_ranks(config.actor.layout.world_size, train, config, folder, updates(folder), **packing)


@pytest.mark.parametrize(
    "pair",
    exhaustive_but(
        [f"{layout}: {variant}" for layout, variant in product(LAYOUTS, VARIANTS)],
        *("one process: packed", "PP2, VPP2, EP2: nothing shared", "CP2, EP2: padded", "TP2, SP, EP2: full recompute"),
    ),
)
def test_replayed_training_matches_a_plain_model(folder, outcome, pair):
    """This includes the routers' gradient, which comes only from the scores of the replayed experts."""
    layout, _, variant = pair.partition(": ")
    assert_same_training(folder, trained(folder, layout, variant), outcome)


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "one process", "PP2, VPP2, EP2", "CP2, EP2"))
def test_metrics_cover_all_ranks(folder, outcome, reference, layout):
    """All layouts count the same tokens if samples share none."""
    reported = [rank.metrics for rank in trained(folder, layout, "nothing shared")]
    for metrics in filter(None, reported):
        assert {name: metrics[f"policy/{name}"].value for name in reference.metrics()} == pytest.approx(
            reference.metrics()
        )
    assert reference.metrics()["routes_differ"] > 0.7  # five of the six pairs of experts differ


def test_all_but_frozen_routers_are_trained(folder):
    start = load_file(folder / "model.safetensors")
    config = config_of(folder, "actor.experts.router=frozen", "actor.layout={dp: 2, ep: 2}")
    weights = canonical(folder, run_ranks(2, train, config, folder, updates(folder)), "weights")
    same = {name for name, weight in start.items() if torch.equal(weights[name], weight)}
    assert same == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2, 3)}


MANY = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=4,
    intermediate_size=96,
    max_position_embeddings=64,
    moe_intermediate_size=32,
    num_experts=32,
    num_experts_per_tok=4,
    mlp_only_layers=[0],
)


def sampled_by_an_engine(folder: Path, groups: list) -> list:
    """Return the samples with an engine's log-probs and routes. transformers acts as the engine: its routers compute in
    bfloat16, unlike the trainer's, which changes the choice between experts with nearly equal scores."""
    engine = Replayed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    for layer in engine.model.model.layers[1:]:
        layer.mlp.gate.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))

    @torch.no_grad()
    def sampled(sample: Sample) -> Sample:
        engine.by(None)
        logits = engine.model(torch.tensor(sample.token_ids[None]).long()).logits[0].float() / TEMPERATURE
        first = len(sample.prompt.token_ids) - 1
        log_probs = logits[first:-1].log_softmax(-1).gather(1, torch.tensor(sample.response_ids).long()[:, None])[:, 0]
        routes = np.stack([own.numpy() for own in engine.own], axis=1).astype(np.int8)
        routes[-1] = NO_ROUTE
        return replace(sample, response_logprobs=log_probs.numpy(), routes=routes)

    return [[(sampled(sample), reward) for sample, reward in group] for group in groups]


def log_probs(store, rank: int, config, folder: Path, groups: list) -> dict[str, dict[str, torch.Tensor]]:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = own_batch(config, worker, groups, None)
    return {name: worker._forward(batch, replays) for name, replays in (("own", False), ("replayed", True))}


def test_replay_reduces_the_mismatch_with_the_engine(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3_moe", **MANY)
    groups = sampled_by_an_engine(folder, random_groups(0, SHARDED_VOCAB))
    [found] = run_ranks(1, log_probs, config_of(folder), folder, groups)
    samples = [sample for group in groups for sample, _ in group]

    def largest_difference(name: str) -> float:
        apart = [found[name][s.id][:, 0].cpu() - torch.tensor(s.response_logprobs) for s in samples]
        return float(torch.cat(apart).abs().max())

    assert largest_difference("replayed") < 0.2 * largest_difference("own")
