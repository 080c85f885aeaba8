"""GRPO through Megatron against plain Hugging Face and torch: loss, gradients, updated weights."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path

import pytest

from megarl.core.completion import CandidateIds
from megarl.core.metrics import merge
from megarl.core.sample import Sample
from tests.closeness import Expected
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import Group, Outcome, assert_same_training, config_of, plain_training, random_groups, train
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama

MANY_MICROBATCHES = "actor.tokens_per_microbatch=64"
LAYOUTS = {
    "1 process": [],
    "PP2, uneven": ["actor.layout.pp=2", "actor.layout.last_stage_layers=1"],
    "TP3": ["actor.layout.tp=3"],
    "DP2": ["actor.layout.dp=2"],
}

TRUNCATED_LAYOUTS = {
    "1 process, 1 microbatch": ["actor.tokens_per_microbatch=1024"],
    "TP3, SP": ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
    "CP2, PP2": ["actor.layout.cp=2", "actor.layout.pp=2"],
}


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.exhaustive)])
def folder(request, tmp_path_factory) -> Path:
    """Three heads and three KV heads, which TP3 divides."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        num_layers=4,
        intermediate_size=96,
        vocab_size=SHARDED_VOCAB,
        tied=request.param == "tied",
    )


UPDATES = [random_groups(seed, SHARDED_VOCAB) for seed in range(2)]


@cache
def plain(folder: Path, kl_coefficient: float) -> Expected[Outcome]:
    """Return the reference, which all layouts share."""
    return plain_training(folder, UPDATES, kl_coefficient)


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "PP2, uneven", "TP3"))
@pytest.mark.parametrize("kl_coefficient", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.05])
def test_step_equals_plain_torch(folder, layout, kl_coefficient):
    config = config_of(folder, f"algorithm.kl.coefficient={kl_coefficient}", MANY_MICROBATCHES, *LAYOUTS[layout])
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, UPDATES)
    assert_same_training(folder, ranks, plain(folder, kl_coefficient))


def truncated(groups: list[Group], seed: int) -> list[Group]:
    """Return the groups as if the engine had kept one to five candidate tokens at most positions of most samples. The
    sampled token is not always among them."""
    source = random.Random(seed)

    def kept(sample: Sample) -> CandidateIds:
        return CandidateIds.of([source.sample(range(SHARDED_VOCAB), source.randrange(6)) for _ in sample.response_ids])

    return [
        [(dataclasses.replace(s, candidate_ids=kept(s)) if source.random() < 0.8 else s, reward) for s, reward in group]
        for group in groups
    ]


TRUNCATED = [truncated(random_groups(seed, SHARDED_VOCAB), seed) for seed in range(2)]


@cache
def plain_truncated(folder: Path) -> Expected[Outcome]:
    return plain_training(folder, TRUNCATED, 0.05)


@pytest.mark.parametrize("layout", exhaustive_but(TRUNCATED_LAYOUTS, "TP3, SP", "CP2, PP2"))
def test_truncated_policies_equal_plain_torch(folder, layout):
    """Log-probs of policy and reference, and their gradients, cover the candidate tokens only."""
    config = config_of(folder, "algorithm.kl.coefficient=0.05", MANY_MICROBATCHES, *TRUNCATED_LAYOUTS[layout])
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, TRUNCATED)
    assert_same_training(folder, ranks, plain_truncated(folder))
    samples = [sample for group in TRUNCATED[-1] for sample, _ in group]
    trained = [
        (target, kept)
        for s in samples
        if s.candidate_ids is not None
        for target, kept, flag in zip(s.response_ids, s.candidate_ids, s.response_mask, strict=True)
        if len(kept) and flag
    ]
    metrics = merge([rank.metrics for rank in ranks if rank.metrics])
    assert metrics["policy/candidates_mean"].value == pytest.approx(
        sum(len(kept) for _, kept in trained) / len(trained)
    )
    outside = sum(target not in kept for target, kept in trained) / len(trained)
    assert metrics["policy/outside_candidates_frac"].value == pytest.approx(outside)
