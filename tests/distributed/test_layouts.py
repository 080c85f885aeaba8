"""Every layout gives the same result: two updates against one plain process, in loss, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

import pytest

from tests.closeness import Expected
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    Outcome,
    assert_same_training,
    branching_group,
    config_of,
    plain_training,
    random_groups,
    train,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama, write_tiny_model

# In the second update, the policy differs from its reference.
UPDATES = [[*random_groups(seed, SHARDED_VOCAB), branching_group(seed, SHARDED_VOCAB)] for seed in range(2)]
KL = 0.05
DENSE = {
    "DP2": "dp: 2",
    "TP2": "tp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "PP2": "pp: 2",
    "PP4": "pp: 4",
    "PP2, uneven": "pp: 2, first_stage_layers: 1",
    "PP3, uneven": "pp: 3, first_stage_layers: 1, last_stage_layers: 1",
    "PP2, VPP2": "pp: 2, vpp: 2",
    "TP2, PP2, SP": "tp: 2, pp: 2, sequence_parallel: true",
    "TP2, PP2, VPP2, SP": "tp: 2, pp: 2, vpp: 2, sequence_parallel: true",
    "CP2": "cp: 2",
    "CP2, TP2, SP": "cp: 2, tp: 2, sequence_parallel: true",
    "CP2, PP2": "cp: 2, pp: 2",
    "CP2, DP2": "cp: 2, dp: 2",
}
EXPERTS = {
    "EP2": "dp: 2, ep: 2",
    "EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "EP2, TP2, ETP2": "tp: 2, sequence_parallel: true, dp: 2, ep: 2, etp: 2",
    "EP2, DP4": "dp: 4, ep: 2",
    "EP2, PP2": "dp: 2, pp: 2, ep: 2",
    "EP2, CP2": "cp: 2, ep: 2",
    "EP2, PP2, VPP2": "dp: 2, pp: 2, vpp: 2, ep: 2",
}
LATENT = {
    "PP2": "pp: 2",
    "PP2, VPP2": "pp: 2, vpp: 2",
    "CP2, EP2": "cp: 2, ep: 2",
}
CONTEXT = 64
SIZES = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=64,
    num_attention_heads=4,
    num_hidden_layers=4,
    intermediate_size=96,
    max_position_embeddings=CONTEXT,
)
VARIANTS = {
    "packed, several microbatches": (["actor.tokens_per_microbatch=64"], {}),
    "packed, few microbatches": (["actor.tokens_per_microbatch=256"], {}),
    "padded": ([], dict(shares_prompts=False, document_multiple=CONTEXT)),
    "without overlap": (["actor.overlap_communication=false"], {}),
    "full recompute": (["actor.recompute=full"], {}),
    "selective recompute, padded": (
        ["actor.recompute=selective", "actor.tokens_per_microbatch=256"],
        dict(shares_prompts=False, document_multiple=CONTEXT),
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    sizes = dict(num_heads=4, num_kv_heads=2, num_layers=4, vocab_size=SHARDED_VOCAB)
    return write_tiny_llama(tmp_path_factory.mktemp("dense"), **sizes, tied=False)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), num_layers=4, vocab_size=SHARDED_VOCAB)


@pytest.fixture(scope="module")
def expert_outcome(experts: Path) -> Expected[Outcome]:
    return plain_training(experts, UPDATES, KL)


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("latent"),
        "deepseek_v3",
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
    )


@pytest.fixture(scope="module")
def latent_outcome(latent: Path) -> Expected[Outcome]:
    return plain_training(latent, UPDATES, KL)


@pytest.fixture(scope="module")
def dense_outcome(dense: Path) -> Expected[Outcome]:
    return plain_training(dense, UPDATES, KL)


def pairs(layouts: Iterable[str], variants: Iterable[str] = VARIANTS) -> list[str]:
    return [f"{layout}: {variant}" for layout, variant in product(layouts, variants)]


def check(folder: Path, reference: Expected[Outcome], layouts: Mapping[str, str], pair: str) -> None:
    """Train one variant in one layout, and compare the result with the reference."""
    layout, _, variant = pair.partition(": ")
    keys, packing = VARIANTS[variant]
    config = config_of(folder, f"algorithm.kl.coefficient={KL}", f"actor.layout={{{layouts[layout]}}}", *keys)
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, UPDATES, **packing)
    assert_same_training(folder, ranks, reference)


# Each variant is tested in a few layouts, and each kind of layout with at least one variant.
DENSE_IN_TEST = (
    *("DP2: padded", "PP3, uneven: packed, several microbatches", "TP2, SP: full recompute"),
    "CP2, TP2, SP: packed, few microbatches",
)
EXPERTS_IN_TEST = (
    *("EP2: without overlap", "EP2, TP2, ETP1: selective recompute, padded", "EP2, CP2: packed, several microbatches"),
)
LATENT_IN_TEST = ("CP2, EP2: selective recompute, padded",)


@pytest.mark.parametrize("pair", exhaustive_but(pairs(DENSE), *DENSE_IN_TEST))
def test_dense_model(dense, dense_outcome, pair):
    check(dense, dense_outcome, DENSE, pair)


@pytest.mark.parametrize("pair", exhaustive_but(pairs(EXPERTS), *EXPERTS_IN_TEST))
def test_mixture_of_experts(experts, expert_outcome, pair):
    check(experts, expert_outcome, EXPERTS, pair)


@pytest.mark.parametrize(
    "pair",
    exhaustive_but(
        pairs(LATENT, ("packed, several microbatches", "full recompute", "selective recompute, padded")),
        *LATENT_IN_TEST,
    ),
)
def test_latent_attention(latent, latent_outcome, pair):
    check(latent, latent_outcome, LATENT, pair)


@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param("dense", "dp: 4", marks=pytest.mark.exhaustive), ("experts", "dp: 4, ep: 2")]
)
def test_ranks_without_samples_stay_in_sync(request, model, layout):
    """Two samples for four ranks, which happens if the rewards of all other samples fail."""
    folder = request.getfixturevalue(model)
    updates = [[[(sample, float(k)) for k, (sample, _) in enumerate(group[1:3])] for group in u[:1]] for u in UPDATES]
    config = config_of(folder, f"algorithm.kl.coefficient={KL}", f"actor.layout={{{layout}}}")
    ranks = run_ranks(4, train, config, folder, updates)
    assert_same_training(folder, ranks, plain_training(folder, updates, KL))
