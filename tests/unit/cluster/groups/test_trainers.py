from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.cluster.groups.trainers import readers_of
from megarl.cluster.rank_batch import RankBatch
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.planner import make_plan
from tests.unit.resharding.cases import config_of, layout_of


def test_share_contains_the_samples_of_its_microbatches() -> None:
    samples = ["a", "b", "c", "d", "e"]
    rank_batch = RankBatch.of(samples, [(4, 1), (2,)])
    assert rank_batch.samples == ("b", "c", "e")
    assert [[rank_batch.samples[i] for i in members] for members in rank_batch.microbatches] == [["e", "b"], ["c"]]


def test_share_without_microbatches_is_empty() -> None:
    assert RankBatch.of(["a"], []) == RankBatch(samples=(), microbatches=())


def test_readers_of_pipeline_stages() -> None:
    sources, [engine] = (
        megatron_holders(config_of(), layout_of(pp=2), "float32"),
        vllm_holders(config_of(), 1, 1, "float32"),
    )
    assert readers_of(make_plan(sources, [engine])) == {
        source.name: {engine.name: set(source.shapes)} for source in sources
    }


@pytest.mark.parametrize("beside", [{0: 0, 1: 1}, {0: 1, 1: 0}])
def test_engine_reads_only_from_replicas_on_its_device(beside: dict[int, int]) -> None:
    """`beside` maps a trainer to the engine on the same device."""
    sources = [replace(h, device=i) for i, h in enumerate(megatron_holders(config_of(), layout_of(dp=2), "float32"))]
    engines = vllm_holders(config_of(), 1, 2, "float32")
    engines = [
        replace(engines[engine], device=trainer) for trainer, engine in sorted(beside.items(), key=lambda p: p[1])
    ]
    assert readers_of(make_plan(sources, engines)) == {
        f"megatron:{trainer}": {f"vllm:{engine}.0": set(sources[0].shapes)} for trainer, engine in beside.items()
    }
