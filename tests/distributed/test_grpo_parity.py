"""GRPO through Megatron against plain Hugging Face and torch: loss, gradients, updated weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.forked import run_ranks
from tests.parity import assert_same_training, config_of, plain_training, random_groups, train
from tests.tiny_model import write_tiny_llama

LAYOUTS = {
    "1 process": [],
    "PP2, uneven": ["actor.layout.pp=2", "actor.layout.last_stage_layers=1"],
    "TP3": ["actor.layout.tp=3"],
    "DP2": ["actor.layout.dp=2"],
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory) -> Path:
    """3 heads and 3 KV heads, so that tensor parallelism of 3 divides them."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        num_layers=4,
        intermediate_size=96,
        tied=request.param == "tied",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05])
def test_step_equals_plain_torch(folder, layout, kl_coefficient):
    config = config_of(folder, f"algorithm.kl.coefficient={kl_coefficient}", *LAYOUTS[layout])
    updates = [random_groups(seed) for seed in range(2)]
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, updates)
    assert_same_training(folder, ranks, plain_training(folder, updates, kl_coefficient))


def test_leaving_out_the_old_pass_changes_nothing(folder):
    """With one update per step the old policy is the current one."""
    config = config_of(folder)
    updates = [random_groups(0)]
    [without] = run_ranks(1, train, config, folder, updates)
    [with_pass] = run_ranks(1, train, config, folder, updates, True)
    assert all(torch.equal(without.weights[name], with_pass.weights[name]) for name in without.weights)
