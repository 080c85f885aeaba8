"""Sliding windows and attention sinks in Megatron against transformers' gpt-oss attention, in every kind of layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import dense_gpt_oss
from tests.closeness import Expected
from tests.forked import run_ranks
from tests.parity import Outcome, assert_same_training, branching_group, config_of, plain_training, random_groups, train

GROUPS = [*random_groups(0), branching_group(0)]
"""Samples that share prompts and turns, most of them longer than the window."""

LAYOUTS = {
    "one process": ("", "none"),
    "TP2, SP": ("tp: 2, sequence_parallel: true", "none"),
    "TP4": ("tp: 4", "none"),
    "PP2": ("pp: 2", "none"),
    "PP2, uneven": ("pp: 2, first_stage_layers: 1", "selective"),
    "PP2, VPP2": ("pp: 2, vpp: 2", "full"),
    "CP2": ("cp: 2", "none"),
    "TP2, CP2, SP": ("tp: 2, cp: 2, sequence_parallel: true", "full"),
    "DP2": ("dp: 2", "full"),
}
"""Name -> layout and recompute mode."""


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        dense_gpt_oss.register(monkeypatch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return dense_gpt_oss.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcome(folder) -> Expected[Outcome]:
    return plain_training(folder, [GROUPS], kl_coefficient=0.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_matches_transformers(folder, outcome, name):
    layout, recompute = LAYOUTS[name]
    keys = "actor.tokens_per_microbatch=192", f"actor.layout={{{layout}}}", f"actor.recompute={recompute}"
    config = config_of(folder, *keys)
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, [GROUPS])
    assert_same_training(folder, ranks, outcome)
