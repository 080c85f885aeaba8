"""What is recomputed in the backward pass changes neither loss nor gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.forked import run_ranks
from tests.parity import config_of, random_groups, train
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2, num_layers=3)


def trained(folder: Path, mode: str) -> tuple:
    config = config_of(folder, f"actor.recompute={mode}")
    [rank] = run_ranks(1, train, config, folder, [random_groups(0)])
    return rank.metrics["policy/loss"].value, [*rank.gradients.values(), *rank.weights.values()]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_changes_nothing(folder, mode):
    loss, tensors = trained(folder, "none")
    again, recomputed = trained(folder, mode)
    assert again == loss
    assert all(map(torch.equal, tensors, recomputed))
