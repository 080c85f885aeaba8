"""Sliding windows and attention sinks in Megatron against transformers' gpt-oss attention, in every kind of layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn.attention import flex_attention

from megarl.megatron.model import inputs
from megarl.ops.shared_attention import pack_mask
from tests import dense_gpt_oss
from tests.closeness import Expected
from tests.distributed.test_checkpoint import UPDATES, check_round_trip
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import Outcome, assert_same_training, branching_group, config_of, plain_training, random_groups, train

GROUPS = [*random_groups(0, dense_gpt_oss.VOCAB), branching_group(0, dense_gpt_oss.VOCAB)]
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


def check(folder: Path, outcome: Expected[Outcome], name: str) -> None:
    layout, recompute = LAYOUTS[name]
    keys = "actor.tokens_per_microbatch=192", f"actor.layout={{{layout}}}", f"actor.recompute={recompute}"
    config = config_of(folder, *keys)
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, [GROUPS])
    assert_same_training(folder, ranks, outcome)


@pytest.mark.parametrize("name", exhaustive_but(LAYOUTS, "TP4", "PP2, VPP2", "TP2, CP2, SP"))
def test_training_matches_transformers(folder, outcome, name):
    check(folder, outcome, name)


@pytest.mark.parametrize("name", exhaustive_but(["PP2, uneven", "TP2, CP2, SP"], "PP2, uneven"))
def test_one_kernel_as_on_gpus_matches_transformers(monkeypatch, folder, outcome, name):
    # Skip this check, which rejects backward passes on CPU.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(inputs, "documents_of", pack_mask)
    check(folder, outcome, name)


@pytest.mark.exhaustive
def test_checkpoints_survive_a_round_trip(folder, tmp_path):
    """The sinks are split by head under tensor parallelism only."""
    reference = plain_training(folder, UPDATES, kl_coefficient=0.0)
    check_round_trip(folder, reference, tmp_path, ("tp: 2, sequence_parallel: true", "pp: 2"))
