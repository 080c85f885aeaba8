"""Frozen parameters stay bit-identical, and the others train as in plain torch."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.closeness import assert_close, expected
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.marks import exhaustive_but
from tests.parity import EPS, LR, TEMPERATURE, canonical, config_of, random_groups, train
from tests.tiny_model import write_tiny_llama

FIRST_STAGE = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"]
LAST_STAGE = ["model.layers.2.*", "model.layers.3.*", "model.norm.*", "lm_head.*"]
PP2 = "actor.layout.pp=2"
CASES = {
    "embedding": (False, ["*embed_tokens*"], []),
    "head": (False, ["lm_head.*"], []),
    "attention of a layer, tied": (True, ["model.layers.1.self_attn.*"], []),
    "embedding, PP2, tied": (True, ["*embed_tokens*"], [PP2]),
    "first stage, PP2": (False, FIRST_STAGE, [PP2]),
    "first stage, PP2, without overlap": (False, FIRST_STAGE, [PP2, "actor.overlap_communication=false"]),
    "last stage, PP2": (False, LAST_STAGE, [PP2]),
    "all norms, DP2, tied": (True, ["*norm.weight"], ["actor.layout.dp=2"]),
    "embedding, full recompute": (False, ["*embed_tokens*"], ["actor.recompute=full"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[bool, Path]:
    """The models' folders. The key is whether embedding and head are tied."""
    make = tmp_path_factory.mktemp
    return {tied: write_tiny_llama(make("model"), num_kv_heads=2, num_layers=4, tied=tied) for tied in (False, True)}


@pytest.mark.parametrize(
    "case",
    exhaustive_but(
        CASES,
        *("attention of a layer, tied", "embedding, PP2, tied", "first stage, PP2"),
        *("last stage, PP2", "all norms, DP2, tied", "embedding, full recompute"),
    ),
)
def test_only_unfrozen_tensors_are_trained(folders, case):
    tied, patterns, overrides = CASES[case]
    start = load_file(folders[tied] / "model.safetensors")
    config = config_of(folders[tied], f"actor.frozen={patterns}", *overrides)
    updates = [random_groups(seed) for seed in range(2)]
    ranks = run_ranks(config.actor.layout.world_size, train, config, folders[tied], updates)
    weights = canonical(folders[tied], ranks, "weights")

    frozen = {name for name in start if any(fnmatch(name, pattern) for pattern in patterns)}
    assert all(torch.equal(weights[name], start[name]) for name in frozen)
    exact, plain = expected(lambda: plainly_trained(folders[tied], frozen, updates))
    assert all(not torch.equal(weights[name], start[name]) for name in weights if name not in frozen)
    assert_close(weights, exact, plain, "weight")


def plainly_trained(folder: Path, frozen: set[str], updates: list) -> dict[str, torch.Tensor]:
    reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
    named = dict(reference.model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(name not in frozen)
    for groups in updates:
        reference.optimizer.zero_grad()
        reference.loss(groups, 0.0, {}).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        reference.optimizer.step()
    return named
