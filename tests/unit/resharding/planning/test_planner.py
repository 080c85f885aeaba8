"""Properties of plans beyond correctness: balance, one entry per node, bucket sizes, determinism and scale."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holders
from megarl.resharding.piece import Holder, Piece, Shard, num_elements, shape_of
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import MIB, bucket_size, make_plan
from tests.unit.resharding.cases import config_of, layout_of

LLAMA_70B = config_of(
    hidden_size=8192,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    dtype="bfloat16",
)


def holder(name: str, *rectangles, local: str = "w", node: int = 0) -> Holder:
    """Return a holder of the tensor t with one parameter per rectangle."""
    pieces = tuple(
        Piece("t", rectangle, f"{local}{i}", tuple((0, n) for n in shape_of(rectangle)))
        for i, rectangle in enumerate(rectangles)
    )
    shapes = {piece.local: shape_of(piece.local_rectangle) for piece in pieces}
    return Holder(name, Shard(shapes, pieces, dict.fromkeys(shapes, "float32")), node)


def proven(sources: list[Holder], destinations: list[Holder], **options) -> Plan:
    plan = make_plan(sources, destinations, **options)
    check_plan(plan, sources, destinations)
    return plan


def on_nodes(holders: list[Holder], size: int, first: int = 0) -> list[Holder]:
    return [replace(holder, node=first + i // size) for i, holder in enumerate(holders)]


def bytes_sent(plan: Plan) -> Counter[str]:
    """Return the number of bytes that each source sends."""
    sent: Counter[str] = Counter()
    for bucket in plan.buckets:
        for link in bucket.links:
            sent[plan.holders[link.source]] += bucket.num_bytes
    return sent


def test_replicas_share_the_load():
    replicas = [holder(f"replica{i}", ((0, 4),), ((4, 8),)) for i in range(3)]
    plan = proven(replicas, [holder(f"destination{i}", ((0, 4),), ((4, 8),)) for i in range(3)])
    assert bytes_sent(plan) == {"replica0": 32, "replica1": 32, "replica2": 32}
    assert plan.num_bytes == 96


def test_large_tensor_is_split_to_balance_replicas():
    replicas = [holder(f"replica{i}", ((0, 3 * 2**20),)) for i in range(3)]
    for destinations in (1, 2, 4):
        plan = proven(replicas, [holder(f"destination{i}", ((0, 3 * 2**20),)) for i in range(destinations)])
        assert set(bytes_sent(plan).values()) == {destinations * 4 * 2**20}


def test_least_loaded_source_sends_next():
    sources = [holder("a", ((0, 6),)), holder("b", ((0, 6),))]
    plan = proven(sources, [holder("large", ((0, 5),)), holder("small", ((0, 2),), ((2, 4),))])
    assert bytes_sent(plan) == {"a": 20, "b": 16}


def test_partly_overlapping_sources_are_combined():
    sources = [holder("left", ((0, 3), (0, 5))), holder("middle", ((1, 4), (2, 4))), holder("all", ((0, 4), (0, 6)))]
    plan = proven(sources, [holder("d", ((0, 4), (0, 6)))])
    assert set(bytes_sent(plan)) == {"left", "all"}


def test_missing_elements_are_named():
    with pytest.raises(ValueError, match=r"t: no source has the elements \[2:4\]"):
        make_plan([holder("a", ((0, 2),)), holder("b", ((4, 6),))], [holder("d", ((0, 6),))])


def test_bytes_enter_a_node_once_in_turns():
    sources = [holder("a", ((0, 4),), ((4, 8),), ((8, 12),))]
    destinations = [holder(f"d{i}", ((0, 4),), ((4, 8),), ((8, 12),), node=1 + i // 3) for i in range(6)]
    plan = proven(sources, destinations)
    entered = Counter(link.destination for bucket in plan.buckets for link in bucket.links for _ in bucket.moves)
    assert entered == dict.fromkeys(range(1, 7), 1)
    assert all(plan.nodes[a] == plan.nodes[b] for bucket in plan.buckets for a, b in bucket.forwards)
    assert plan.num_bytes == 6 * 48


def test_source_on_the_same_node_is_preferred():
    sources = [holder(f"s{i}", ((0, 4),), node=i) for i in range(2)]
    plan = proven(sources, [holder(f"d{i}", ((0, 4),), node=i % 2) for i in range(4)])
    pairs = {(plan.holders[a], plan.holders[b]) for bucket in plan.buckets for a, b in bucket.links}
    assert pairs == {("s0", "d0"), ("s1", "d1"), ("s0", "d2"), ("s1", "d3")}
    assert not any(bucket.forwards for bucket in plan.buckets)


def test_elements_with_two_names_enter_a_node_once():
    """A tied embedding has two names: the first and the last stage store it."""
    plan = proven(
        [holder("a", ((0, 4),))],
        [holder("first", ((0, 4),), local="embedding", node=1), holder("last", ((0, 4),), local="output", node=1)],
    )
    assert [[plan.holders[number] for number in link] for b in plan.buckets for link in b.links] == [
        ["a", "first"],
        ["first", "last"],
    ]


def test_holder_with_two_copies_receives_both():
    plan = proven([holder("a", ((0, 4),))], [holder("d", ((0, 4),), ((0, 4),))])
    assert plan.num_bytes == 32


def test_large_tensors_are_split_to_fit_buckets():
    size = 1000
    plan = proven(
        [holder("a", ((0, 30), (0, 100)), ((30, 35), (0, 100)))],
        [holder("d", ((0, 35), (0, 100)))],
        bucket_bytes=size,
    )
    assert max(bucket.num_bytes for bucket in plan.buckets) <= size
    assert sum(bucket.num_bytes for bucket in plan.buckets) == 14000
    assert all(a.num_bytes + b.num_bytes > size for a, b in pairwise(plan.buckets))


def test_casts_are_declared_and_sent_in_destination_dtype():
    config = config_of()
    plan = proven([huggingface_holder(config, "float32")], vllm_holders(config, 1, 1, "bfloat16"))
    moves = [move for bucket in plan.buckets for move in bucket.moves]
    assert {(move.source_dtype, move.destination_dtype) for move in moves} == {("float32", "bfloat16")}
    assert plan.num_bytes == sum(2 * num_elements(move.source.rectangle) for move in moves)


def test_into_returns_the_writes_of_a_destination():
    ranks = megatron_holders(config_of(), layout_of(tp=3))
    plan = proven(ranks, vllm_holders(config_of(), 1, 2))
    parts = [plan.into(f"vllm:{replica}.0") for replica in range(2)]
    assert [copy.move for copy in parts[0].copies] == [copy.move for copy in parts[1].copies]
    written = {copy.move.destination.parameter for copy in parts[0].copies}
    assert written == set(vllm_holders(config_of(), 1, 1)[0].shapes)
    assert {fill.place.parameter for fill in parts[0].fills} == {"model.embed_tokens.weight", "lm_head.weight"}
    with pytest.raises(
        ValueError, match=r"vllm:2.0 is not a destination in the plan. Its destinations are vllm:0.0, vllm:1.0"
    ):
        plan.into("vllm:2.0")


def test_plan_hash_is_deterministic_and_distinguishes_plans():
    ranks = megatron_holders(config_of(), layout_of(tp=3))
    plan = make_plan(ranks, [huggingface_holder(config_of())])
    code = (
        "from megarl.resharding.families import huggingface_holder, megatron_holders\n"
        "from megarl.resharding.planning.planner import make_plan\n"
        "from tests.unit.resharding.cases import config_of, layout_of\n"
        "print(make_plan(megatron_holders(config_of(), layout_of(tp=3)), [huggingface_holder(config_of())]).plan_hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # differs from this process
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == plan.plan_hash
    assert make_plan(ranks[::-1], [huggingface_holder(config_of())]).plan_hash != plan.plan_hash
    assert make_plan(on_nodes(ranks, 1), [huggingface_holder(config_of())]).plan_hash != plan.plan_hash


def test_large_model_is_planned_and_checked_in_seconds():
    start = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    ranks = on_nodes(megatron_holders(LLAMA_70B, layout_of(tp=8, pp=8, dp=4)), 8)
    proven(ranks, on_nodes(vllm_holders(LLAMA_70B, 8, 16), 8, first=32))
    assert sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - start < 5


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_data_parallel_replicas_are_balanced(replicas):
    ranks = on_nodes(megatron_holders(LLAMA_70B, layout_of(tp=8, pp=8, dp=4)), 8)
    sent = bytes_sent(proven(ranks, on_nodes(vllm_holders(LLAMA_70B, 8, replicas), 8, first=32)))
    for first in range(0, len(ranks), 32):
        for tp_rank in range(8):
            shares = [sent[f"megatron:{first + 8 * dp_rank + tp_rank}"] for dp_rank in range(4)]
            assert max(shares) <= 1.05 * sum(shares) / 4


def test_bucket_size_is_a_small_part_of_a_destination():
    assert bucket_size(vllm_holders(config_of(), 1, 1)) == MIB
    [folder] = [huggingface_holder(LLAMA_70B | {"num_hidden_layers": 4})]
    assert bucket_size([folder]) == folder.shard.num_bytes // 64 > MIB
    assert bucket_size(vllm_holders(LLAMA_70B, 1, 1)) == 256 * MIB
