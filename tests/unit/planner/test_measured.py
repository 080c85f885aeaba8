"""The planner's measured constants against the recorded results of the GPU."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest

from megarl.cluster.memory.rank import rank_memory
from megarl.core import measured
from megarl.planner.hardware import GPUS
from tests.paths import ROOT
from tests.published_models import CONFIGS
from tests.unit.cluster.memory.test_rank import QWEN_1_5B, layout

RESULT = json.loads((ROOT / "tools/benchmarks/results/h100.json").read_text())
NOW, MACHINE = RESULT["now"], RESULT["machine"]
UPDATE = NOW["update_8b"]
GPU = GPUS["H100-80GB"]


def test_memory_outside_tensors_matches_recorded_results() -> None:
    parts = (measured.CUDA_CONTEXT, measured.FIRST_COMMUNICATOR, measured.TRAINER_KERNELS)
    assert parts[0].value == MACHINE["context_bytes"] and parts[1].value == MACHINE["communicator_of_one_bytes"]
    assert sum(part.value for part in parts) == pytest.approx(UPDATE["outside_torch_bytes"], rel=1e-3)
    updates = [NOW[name] for name in ("update_8b", "update_1b5", "update_1b5_16k")]
    fragments = [update["peak_reserved_bytes"] - update["peak_bytes"] for update in updates]
    assert measured.FRAGMENTS.value == max(fragments)


def test_throughput_fractions_match_recorded_results() -> None:
    without_optimizer = UPDATE["seconds"] - UPDATE["optimizer_seconds"]
    dense = UPDATE["mfu_of_h100"] * UPDATE["seconds"] / without_optimizer
    assert measured.DENSE_SHARE.value == pytest.approx(dense, abs=0.005)
    adam = 30 * UPDATE["parameters"] / UPDATE["optimizer_seconds"]
    assert measured.OPTIMIZER_SHARE.value == pytest.approx(adam / (GPU.memory_gb_s * 1e9), abs=0.005)
    moves = [NOW["state"][f"offload {part}"][1] for part in ("optimizer", "parameters")]
    speeds = [move["bytes"] / move[way] for move in moves for way in ("out", "in")]
    assert measured.HOST_LINK_SHARE.value == pytest.approx(mean(speeds) / (GPU.host_gb_s * 1e9), abs=0.005)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("update_8b", CONFIGS["Llama-3.1-8B"] | {"num_hidden_layers": 8}),
        ("update_1b5", QWEN_1_5B),
        ("update_1b5_16k", QWEN_1_5B),
    ],
)
def test_peak_memory_is_within_a_twentieth_of_the_plan(name: str, config: dict[str, Any]) -> None:
    """The updates have tied embeddings, and three quarters of their tokens are in responses."""
    update = NOW[name]
    tokens, count = update["tokens_per_microbatch"], update["tokens"] // update["tokens_per_microbatch"]
    form = rank_memory(config | {"tie_word_embeddings": True}, layout(), 0, 2, tokens, tokens * 3 // 4, count)
    assert update["peak_bytes"] == pytest.approx(form.total, rel=0.05)
