"""Refit figures of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.planner.refit_preview import preview_refit, transport_of
from megarl.resharding.planning.preview import reshard
from tests.paths import BASE
from tests.unit.resharding.cases import config_of

SPEEDS = "inter=50GB/s,intra=400GB/s"
LAYOUT = ("actor.layout={tp: 2, pp: 2, dp: 2}", "rollout.tp=2")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(vocab_size=64, num_key_value_heads=6) | {"max_position_embeddings": 4096})
    )
    return tmp_path


def recipe(model: Path, placement: str, *overrides: str) -> Config:
    keys = [f"model.path={model}", "model.dtype=float32", "data.source=arithmetic", f"cluster.placement={placement}"]
    return load(BASE, [*keys, *LAYOUT, *overrides])


def test_colocated_preview_equals_reshard(model: Path) -> None:
    """The bytes per link match `megarl reshard` for the same layouts."""
    for ranks_per_node in (8, 4):
        found = preview_refit(recipe(model, "colocated", "rollout.replicas=4"), ranks_per_node, SPEEDS)
        sides = "tp=2,pp=2,dp=2", "vllm:tp=2,replicas=4"
        assert found == reshard(str(model), *sides, ranks_per_node, SPEEDS, colocated=True)
        assert found.bytes_by_link["local"] > 0 == found.bytes_wasted


def test_disaggregated_preview_equals_reshard(model: Path) -> None:
    """GPUs are numbered over trainers and engines, which are on two nodes of 8 GPUs or on one node of 12 GPUs."""
    config = recipe(model, "disaggregated", "rollout.replicas=2")
    apart, together = (preview_refit(config, ranks, SPEEDS) for ranks in (8, 12))
    expected = reshard(str(model), "tp=2,pp=2,dp=2", "vllm:tp=2,replicas=2", 8, SPEEDS)
    assert apart.bytes_by_link == expected.bytes_by_link and apart.bytes_by_link["inter"] > 0
    assert together.bytes_by_link == {"inter": 0, "intra": apart.bytes_total, "local": 0}


def test_fp8_refit_sends_one_byte_per_element(model: Path) -> None:
    sizes = dict(hidden_size=1536, head_dim=256, intermediate_size=1536, num_key_value_heads=6, vocab_size=64)
    (model / "config.json").write_text(json.dumps(config_of(**sizes) | {"max_position_embeddings": 4096}))
    keys = "rollout.quantization=fp8_block", "model.dtype=bfloat16", "rollout.replicas=4"
    found = preview_refit(recipe(model, "disaggregated", *keys), 8, SPEEDS)
    layers = 2 * (4 * 1536 * 1536 + 3 * 1536 * 1536)
    others = 2 * (2 * 64 * 1536 + (2 * 2 + 1) * 1536 * 2)
    assert found.bytes_total == pytest.approx(4 * (layers * (1 + 4 / 128**2) + others), rel=1e-3)
    assert found.bytes_wasted == 0


def test_colocated_preview_accepts_fewer_engines_than_ranks(model: Path) -> None:
    """A recipe for CPUs may have fewer engine ranks than trainer ranks."""
    found = preview_refit(recipe(model, "colocated", "rollout.replicas=1"), 8, SPEEDS)
    assert (found.ranks_source, found.ranks_destination) == (8, 2)
    assert found.bytes_by_link["local"] > 0 == found.bytes_by_link["inter"]


def test_transport_description_follows_the_placement(model: Path) -> None:
    """With two devices per node, each node holds one pipeline stage, and engines receive the other over the network."""
    colocated, apart = recipe(model, "colocated"), recipe(model, "disaggregated")
    assert transport_of(colocated, preview_refit(colocated, 8, SPEEDS)).endswith(
        "cluster.placement=colocated, rollout.transport=auto: read in place, by CUDA IPC or in shared memory"
    )
    assert transport_of(colocated, preview_refit(colocated, 2, SPEEDS)).endswith(
        "in shared memory; sent between nodes over NCCL or gloo if an engine's node does not hold them"
    )
    assert transport_of(apart, preview_refit(apart, 8, SPEEDS)).endswith("auto: sent over NCCL or gloo")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.tp=4"], r"^rollout.tp=4: 6 attention heads are not divisible by 4"),
        (
            ["model.path=nobody/nothing"],
            r"^model.path=nobody/nothing: .* nor a downloaded Hub id. Fix: use a folder that contains",
        ),
        (["data.format=messages", "algorithm.objective.name=sft"], r"^data.format=messages: the recipe has no engines"),
    ],
)
def test_unplannable_recipe_is_refused(model: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preview_refit(recipe(model, "colocated", *overrides), 8, SPEEDS)
