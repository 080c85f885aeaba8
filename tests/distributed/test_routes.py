"""Replayed routes: one answer in every layout, that of a plain model of transformers whose routers go by them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.core.types import NO_ROUTE
from megarl.megatron import parallel
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.critic import CriticWorker
from tests.forked import run_ranks
from tests.marks import newest_of
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Outcome,
    assert_same_training,
    branching_group,
    canonical,
    config_of,
    own_batch,
    plain_outcome,
    random_groups,
    train_variants,
)
from tests.routes import ReplayedGrpo, with_routes
from tests.tiny_model import write_tiny_experts

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
    "packed": ([], {}),
    "nothing shared": ([], dict(shares_prompts=False)),
    "padded": (["actor.tokens_per_microbatch=128"], dict(shares_prompts=False, document_multiple=64)),
    "full recompute": (["actor.recompute=full"], {}),
    "selective recompute": (["actor.recompute=selective", "actor.tokens_per_microbatch=256"], {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Its second layer is dense."""
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), num_layers=4)


@cache
def updates(folder: Path) -> list:
    """Of the second, the policy is no longer its reference."""
    return [with_routes(folder, [*random_groups(seed), branching_group(seed)]) for seed in range(2)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReplayedGrpo:
    return ReplayedGrpo(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def outcome(folder: Path, reference: ReplayedGrpo) -> Outcome:
    return plain_outcome(reference, updates(folder), KL)


@cache
def trained(folder: Path, layout: str) -> list:
    cases = {
        name: (config_of(folder, f"algorithm.kl.coefficient={KL}", f"actor.layout={{{layout}}}", *keys), packing)
        for name, (keys, packing) in VARIANTS.items()
    }
    world_size = cases["packed"][0].actor.layout.world_size
    return run_ranks(world_size, train_variants, cases, folder, updates(folder))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", newest_of(LAYOUTS, "TP2, SP, EP2", "PP2, VPP2, EP2"))
def test_replayed_training_is_that_of_a_plain_model(folder, outcome, layout, variant):
    """Also the gradient of the routers, which have no other than that of the scores of the replayed experts."""
    ranks = [rank[variant] for rank in trained(folder, LAYOUTS[layout])]
    assert_same_training(folder, ranks, outcome)


@pytest.mark.parametrize("layout", newest_of(LAYOUTS, "TP2, SP, EP2"))
def test_metrics_are_counted_over_all_ranks(folder, outcome, reference, layout):
    """Where no sample shares tokens with others, all layouts count the same ones."""
    reported = [rank["nothing shared"].metrics for rank in trained(folder, LAYOUTS[layout])]
    for metrics in filter(None, reported):
        assert {name: metrics[f"policy/{name}"].value for name in reference.metrics()} == pytest.approx(
            reference.metrics()
        )
    assert reference.metrics()["routes_differ"] > 0.7  # of six pairs of experts, five are others
