"""One estimator of each kind through Megatron, in every kind of layout, against plain Hugging Face and torch.

The kinds: whole samples; whitened tokens with the KL in the reward; and token rewards compared within the group.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.closeness import Expected, expected
from tests.estimator_reference import (
    Divergence,
    EstimatorReference,
    mean_of_others,
    sample_estimate,
    standardized,
    token_estimate,
    whitened,
)
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Outcome,
    assert_same_training,
    config_of,
    plain_outcome,
    random_groups,
    train,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama

# In the second update, the policy differs from its reference.
UPDATES = [random_groups(seed, SHARDED_VOCAB) for seed in range(2)]
SOURCE = random.Random(3)
TOKEN_REWARDS = {
    sample.id: [SOURCE.gauss(0.3, 1) for _ in sample.response_ids]
    for groups in UPDATES[:1]
    for group in groups
    for sample, _ in group
}
LAYOUTS = {
    "DP2": "dp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "PP2": "pp: 2",
    "CP2": "cp: 2",
    "EP2": "dp: 2, ep: 2",
}
KINDS = {
    "whole samples, their KL in the reward": (
        ["algorithm.kl={placement: reward, level: sequence, estimator: k3, coefficient: 0.5}"],
        sample_estimate(standardized, Divergence(0.5, "k3", "sequence")),
    ),
    "tokens, their KL in the reward": (
        [
            "algorithm.advantage={estimator: reinforce_plus_plus, gamma: 0.9}",
            "algorithm.kl={placement: reward, level: token, estimator: k1, coefficient: 0.5}",
        ],
        whitened(token_estimate(0.9, Divergence(0.5, "k1", "token"))),
    ),
    "tokens, compared within the group": (
        ["algorithm.advantage={estimator: rloo, credit: reward_to_go}"],
        sample_estimate(mean_of_others, learned=TOKEN_REWARDS),
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense"), num_heads=4, num_kv_heads=2, vocab_size=SHARDED_VOCAB)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), vocab_size=SHARDED_VOCAB)


@cache
def plain(folder: Path, kind: str) -> Expected[Outcome]:
    def trained() -> Outcome:
        reference = EstimatorReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
        reference.estimate = KINDS[kind][1]
        return plain_outcome(reference, updates_of(kind), 0.0)

    return expected(trained)


def updates_of(kind: str) -> list:
    return UPDATES[:1] if "compared" in kind else UPDATES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "PP2", "CP2"))
def test_update_equals_plain_torch(dense, experts, layout, kind):
    folder = experts if layout == "EP2" else dense
    config = config_of(folder, *KINDS[kind][0], f"actor.layout={{{LAYOUTS[layout]}}}")
    given = (
        {"implicit_reward": {name: torch.tensor(own) for name, own in TOKEN_REWARDS.items()}}
        if "compared" in kind
        else {}
    )
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, updates_of(kind), given=given)
    assert_same_training(folder, ranks, plain(folder, kind))
