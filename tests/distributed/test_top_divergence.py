"""Divergences over the teacher's most probable tokens: sharded weights compared with full logits of the whole
weights."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.closeness import expected, limit, relative_error
from tests.distributed.test_divergence import case_of, join, shard
from tests.divergence_case import DivergenceCase
from tests.forked import run_ranks
from tests.top_divergence_case import plain, plain_tokens, tiled, tiled_tokens

SIZES = [(100, 102, 120), (100, 180, 102), (7, 12, 18)]
"""Vocabulary size, and the rows of the student's and the teacher's weight. In the second case, the third rank holds
only padding of the student's weight; in the third case, a rank holds fewer than k tokens."""
VARIANTS = [(sizes, k, kind) for sizes in SIZES for k, kind in ((5, "reverse_kl"), (1, "forward_kl"), (40, "jsd"))]


def own_case(whole: DivergenceCase, rank: int, world_size: int) -> DivergenceCase:
    student, teacher = (shard(layer, rank, world_size) for layer in (whole.student, whole.teacher))
    return DivergenceCase(student, teacher, whole.targets, whole.temperature, whole.vocab, whole.gradient)


def sharded(store, rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Return this rank's values and gradients, with the ids of the teacher's tokens, by variant."""
    join(store, rank, world_size)
    results = []
    for sizes, k, kind in VARIANTS:
        own, group = own_case(case_of(sizes, torch.float32), rank, world_size), dist.group.WORLD
        results.append(tiled(own, k, kind, 0.5, group) | {"ids": tiled_tokens(own, k, group).ids})
    return results


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_sharded_divergence_equals_the_whole_one(world_size):
    ranks = run_ranks(world_size, sharded, world_size)
    for (sizes, k, kind), *own in zip(VARIANTS, *ranks, strict=True):
        case = case_of(sizes, torch.float32)
        exact, in_float32 = expected(partial(plain, case, k, kind, 0.5))
        shared = {"hidden": sum(result["hidden"] for result in own)}
        shared |= {name: torch.cat([result[name] for result in own]) for name in ("weight", "bias")}
        ids = expected(partial(plain_tokens, case, k)).exact["ids"]
        for result in own:
            assert torch.equal(result["ids"], ids)
            actual, tolerance = result | shared, limit(exact, in_float32)
            assert all(relative_error(actual[name], exact[name]) <= tolerance for name in exact), (sizes, k, kind)
