"""Divergences with sharded weights against full logits of the whole weights."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megarl.ops import head_tile, output_layer
from megarl.ops.output_layer import OutputLayer
from tests.closeness import assert_matches
from tests.divergence_case import KINDS, DivergenceCase, plain, tiled
from tests.forked import run_ranks
from tests.timing import RANKS_S

SIZES = [(100, 102, 120), (100, 180, 102), (7, 12, 18), (101, 150, 150)]
"""Vocabulary size, and the rows of the student's and the teacher's weight. In the second one, a third rank holds only
padding of the student's."""


def case_of(sizes: tuple[int, int, int], dtype: torch.dtype) -> DivergenceCase:
    vocab, *padded = sizes
    return DivergenceCase.random(37, vocab, tuple(padded), None, (True, True), dtype)


def shard(layer: OutputLayer, rank: int, world_size: int, num_rows: int | None = None) -> OutputLayer:
    """Return a rank's part of the layer if each rank has `num_rows` rows; None: an equal share of the layer's rows."""
    num_rows = num_rows or len(layer.weight) // world_size
    padding = max(0, num_rows * world_size - len(layer.weight))
    weight, bias = layer.weight, layer.bias
    weight, bias = (torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in (weight, bias))
    begin = rank * num_rows
    return replace(layer, weight=weight[begin : begin + num_rows].clone(), bias=bias[begin : begin + num_rows].clone())


def join(store, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=RANKS_S))
    output_layer.CPU_TILE, head_tile.BLOCK = (16, 24), 100


def sharded(store, rank: int, world_size: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return this rank's values and gradients, by size and kind."""
    join(store, rank, world_size)
    results = []
    for sizes in SIZES:
        whole = case_of(sizes, dtype)
        student = shard(whole.student, rank, world_size)
        own = replace(whole, student=student, teacher=shard(whole.teacher, rank, world_size, len(student.weight)))
        results += [tiled(own, kind, beta, dist.group.WORLD) for kind, beta in KINDS]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_divergence_equals_the_whole_one(world_size, dtype):
    ranks = run_ranks(world_size, sharded, world_size, dtype)
    variants = [(sizes, kind) for sizes in SIZES for kind in KINDS]
    for (sizes, kind), *own in zip(variants, *ranks, strict=True):
        shared = {"hidden": sum(result["hidden"].float() for result in own).to(dtype)}
        shared |= {name: torch.cat([result[name] for result in own]) for name in ("weight", "bias")}
        for result in own:
            assert_matches(result | shared, partial(plain, case_of(sizes, dtype), *kind), f"{sizes}, {kind}")


def rejected(store, rank: int, world_size: int) -> str:
    join(store, rank, world_size)
    whole = case_of(SIZES[0], torch.float32)
    student, teacher = (shard(layer, rank, world_size) for layer in (whole.student, whole.teacher))
    with pytest.raises(ValueError) as error:
        tiled(replace(whole, student=student, teacher=teacher), "jsd", 0.5, dist.group.WORLD)
    return str(error.value)


def test_shards_that_are_not_aligned_are_rejected():
    for message in run_ranks(2, rejected, 2):
        assert message.startswith("the student's shard has 51 rows")
