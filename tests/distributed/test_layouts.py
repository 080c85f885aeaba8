"""One answer in every layout: three updates against one plain process, in loss, gradients and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.parity import Outcome, assert_same_training, config_of, plain_training, random_groups, train
from tests.tiny_model import write_tiny_llama

UPDATES = [random_groups(seed) for seed in range(3)]
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
CONTEXT = 64
VARIANTS = {
    "packed, several microbatches": ([], {}),
    "packed, few microbatches": (["actor.tokens_per_microbatch=256"], {}),
    "padded": (["actor.tokens_per_microbatch=128"], dict(shares_prompts=False, document_multiple=CONTEXT)),
    "without overlap": (["actor.overlap_communication=false"], {}),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense"), num_heads=4, num_kv_heads=2, num_layers=4, tied=False)


@pytest.fixture(scope="module")
def of_dense(dense: Path) -> Outcome:
    return plain_training(dense, UPDATES, KL)


def check(folder: Path, reference: Outcome, layout: str, variant: str) -> None:
    overrides, packing = VARIANTS[variant]
    config = config_of(folder, f"algorithm.kl.coefficient={KL}", f"actor.layout={{{layout}}}", *overrides)
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, UPDATES, **packing)
    assert_same_training(folder, ranks, reference)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", DENSE)
def test_dense_model(dense, of_dense, layout, variant):
    check(dense, of_dense, DENSE[layout], variant)
