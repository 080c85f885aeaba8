"""Divergences with sharded weights against full logits of the whole weights."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megarl.ops import head_tile, output_layer
from megarl.ops.divergence import align_rows
from megarl.ops.output_layer import OutputLayer
from tests.closeness import expected, limit, relative_error
from tests.divergence_case import KINDS, DivergenceCase, plain, tiled
from tests.forked import run_ranks

SIZES = [(100, 102, 120), (100, 180, 102), (7, 12, 18), (101, 150, 150)]
"""Vocabulary size, and the rows of the student's and the teacher's weight. In the second one, a third rank holds only
padding of the student's."""

BFLOAT16_TOLERANCE = 2e-2
"""The shards round logits' gradients to bfloat16."""


def case_of(sizes: tuple[int, int, int], dtype: torch.dtype) -> DivergenceCase:
    vocab, *padded = sizes
    return DivergenceCase.random(37, vocab, tuple(padded), None, (True, True), dtype)


def shard(layer: OutputLayer, rank: int, world_size: int) -> OutputLayer:
    weight, bias = (x.chunk(world_size)[rank].clone() for x in (layer.weight, layer.bias))
    return replace(layer, weight=weight, bias=bias)


def join(store, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    output_layer.CPU_TILE, head_tile.BLOCK = (16, 24), 100


def sharded(store, rank: int, world_size: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return this rank's values and gradients, by size and kind."""
    join(store, rank, world_size)
    results = []
    for sizes in SIZES:
        whole = case_of(sizes, dtype)
        student, teacher = (shard(layer, rank, world_size) for layer in (whole.student, whole.teacher))
        weight, bias = (align_rows(x, len(student.weight), dist.group.WORLD) for x in (teacher.weight, teacher.bias))
        own = replace(whole, student=student, teacher=replace(teacher, weight=weight, bias=bias))
        results += [tiled(own, kind, beta, dist.group.WORLD) for kind, beta in KINDS]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_divergence_equals_the_whole_one(world_size, dtype):
    ranks = run_ranks(world_size, sharded, world_size, dtype)
    variants = [(sizes, kind) for sizes in SIZES for kind in KINDS]
    for (sizes, kind), *own in zip(variants, *ranks, strict=True):
        exact, in_float32 = expected(partial(plain, case_of(sizes, dtype), *kind))
        shared = {"hidden": sum(result["hidden"].float() for result in own)}
        shared |= {name: torch.cat([result[name].float() for result in own]) for name in ("weight", "bias")}
        tolerance = limit(exact, in_float32) if dtype == torch.float32 else BFLOAT16_TOLERANCE
        for result in own:
            actual = result | shared
            assert all(relative_error(actual[name], exact[name]) <= tolerance for name in exact), (sizes, kind)


def aligned(store, rank: int, world_size: int) -> list[torch.Tensor]:
    join(store, rank, world_size)
    rows = torch.arange(24 * 5).reshape(24, 5).chunk(world_size)[rank]
    return [align_rows(rows, num_rows, dist.group.WORLD) for num_rows in (3, 7, 24 // world_size, 11, 30)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_aligned_rows_are_those_of_the_new_split(world_size):
    ranks = run_ranks(world_size, aligned, world_size)
    for num_rows, *parts in zip((3, 7, 24 // world_size, 11, 30), *ranks, strict=True):
        weight = torch.zeros(world_size * num_rows, 5, dtype=torch.long)
        kept = min(24, len(weight))
        weight[:kept] = torch.arange(24 * 5).reshape(24, 5)[:kept]
        assert torch.equal(torch.cat(parts), weight)


def rejected(store, rank: int, world_size: int) -> str:
    join(store, rank, world_size)
    whole = case_of(SIZES[0], torch.float32)
    student, teacher = (shard(layer, rank, world_size) for layer in (whole.student, whole.teacher))
    with pytest.raises(ValueError) as error:
        tiled(replace(whole, student=student, teacher=teacher), "jsd", 0.5, dist.group.WORLD)
    return str(error.value)


def test_shards_that_are_not_aligned_are_rejected():
    for message in run_ranks(2, rejected, 2):
        assert message.startswith("the student's shard has 51 rows") and "align_rows" in message
