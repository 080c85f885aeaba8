from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megarl.resharding.check import check_plan
from megarl.resharding.families import huggingface_holder, megatron_holder, vllm_holder
from megarl.resharding.piece import Holder, Piece, num_elements, shape_of
from megarl.resharding.plan import Copy, make_plan
from tests.unit.resharding.cases import config_of, layout_of

LLAMA_70B = config_of(
    hidden_size=8192,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
)


def holder(name: str, *rectangles, local: str = "w") -> Holder:
    """Of the tensor t: each rectangle is a parameter of its own."""
    pieces = tuple(
        Piece("t", rectangle, f"{local}{i}", tuple((0, n) for n in shape_of(rectangle)))
        for i, rectangle in enumerate(rectangles)
    )
    return Holder(name, {piece.local: shape_of(piece.local_rectangle) for piece in pieces}, pieces)


def given_by(plan) -> dict[str, int]:
    elements: dict[str, int] = {}
    for copy in plan.copies:
        elements[copy.source] = elements.get(copy.source, 0) + num_elements(copy.source_rectangle)
    return elements


def test_replicas_share_the_load():
    replicas = [holder(f"replica{i}", ((0, 4),), ((4, 8),)) for i in range(3)]
    destinations = [holder(f"destination{i}", ((0, 4),), ((4, 8),)) for i in range(3)]
    plan = make_plan(replicas, destinations)
    assert given_by(plan) == {"replica0": 8, "replica1": 8, "replica2": 8}
    assert plan.copies[0] == Copy("replica0", "w0", ((0, 4),), "destination0", "w0", ((0, 4),))
    assert [copy.source for copy in plan.copies] == ["replica0", "replica1", "replica2"] * 2
    assert plan.bytes_by_link(2)["replica0", "destination0"] == 8
    assert sum(plan.bytes_by_link(2).values()) == 48


def test_a_smaller_load_wins_over_the_order():
    plan = make_plan(
        [holder("a", ((0, 6),)), holder("b", ((0, 6),))],
        [holder("large", ((0, 5),)), holder("small", ((0, 2),), ((2, 4),))],
    )
    assert [copy.source for copy in plan.copies] == ["a", "b", "b"]


def test_sources_that_overlap_in_part():
    sources = [holder("left", ((0, 3), (0, 5))), holder("middle", ((1, 4), (2, 4))), holder("all", ((0, 4), (0, 6)))]
    destinations = [holder("d", ((0, 4), (0, 6)))]
    plan = make_plan(sources, destinations)
    check_plan(plan, sources, destinations)
    assert set(given_by(plan)) == {"left", "middle", "all"}


def test_elements_that_nobody_has():
    with pytest.raises(ValueError, match=r"t: no source holds the elements \[2:4\]"):
        make_plan([holder("a", ((0, 2),)), holder("b", ((4, 6),))], [holder("d", ((0, 6),))])


def test_a_plan_has_parts_and_nothing_else():
    ranks = [megatron_holder(config_of(), layout_of(tp=3), rank) for rank in range(3)]
    workers = [vllm_holder(config_of(), 1, 0, replica) for replica in range(2)]
    plan = make_plan(ranks, workers)
    parts = [plan.for_destination(worker.name) for worker in workers]
    assert plan.copies == parts[0].copies + parts[1].copies
    assert plan.fills == parts[0].fills + parts[1].fills
    assert plan.for_destination("vllm:2.0").copies == ()


def test_the_hash_is_the_same_in_every_process_and_tells_plans_apart():
    ranks = [megatron_holder(config_of(), layout_of(tp=3), rank) for rank in range(3)]
    plan = make_plan(ranks, [huggingface_holder(config_of())])
    code = (
        "from tests.unit.resharding.test_plan import *\n"
        "ranks = [megatron_holder(config_of(), layout_of(tp=3), rank) for rank in range(3)]\n"
        "print(make_plan(ranks, [huggingface_holder(config_of())]).plan_hash)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == plan.plan_hash
    assert make_plan(ranks[::-1], [huggingface_holder(config_of())]).plan_hash != plan.plan_hash


def test_a_large_model_is_planned_and_proven_in_seconds():
    layout = layout_of(tp=8, pp=8)
    start = time.monotonic()
    ranks = [megatron_holder(LLAMA_70B, layout, rank) for rank in range(64)]
    workers = [vllm_holder(LLAMA_70B, 8, rank, replica) for replica in range(2) for rank in range(8)]
    plan = make_plan(ranks, workers)
    check_plan(plan, ranks, workers)
    assert time.monotonic() - start < 5


def test_data_parallel_replicas_are_balanced():
    layout = layout_of(tp=8, pp=8, dp=4)
    ranks = [megatron_holder(LLAMA_70B, layout, rank) for rank in range(layout.world_size)]
    workers = [vllm_holder(LLAMA_70B, 8, rank, replica) for replica in range(8) for rank in range(8)]
    elements = given_by(make_plan(ranks, workers))
    for first in range(0, layout.world_size, 32):
        for tp_rank in range(8):
            replicas = [elements[f"megatron:{first + 8 * dp_rank + tp_rank}"] for dp_rank in range(4)]
            assert max(replicas) <= 1.05 * sum(replicas) / 4
