"""The head with its weight sharded over ranks against full logits of the whole weight."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import relative_error
from tests.forked import run_ranks

TOKENS, HIDDEN, VOCAB = 37, 16, 100


def inputs(padded: int):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(),
        torch.randn(padded, HIDDEN, generator=generator).requires_grad_(),
        torch.randint(VOCAB, (TOKENS,), generator=generator),
        torch.randn(TOKENS, 2, generator=generator),
    )


def sharded(store, rank: int, world_size: int, padded: int):
    """On one rank: value, this shard's part of the hidden gradient, and its weight gradient."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    hidden, weight, targets, gradient = inputs(padded)
    shard = weight.detach().chunk(world_size)[rank].clone().requires_grad_()
    scored = log_prob_and_entropy(hidden, shard, targets, 0.9, VOCAB, dist.group.WORLD)
    return scored.detach(), *torch.autograd.grad((scored * gradient).sum(), (hidden, shard))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("padded", [102, 180])  # in the second, a rank holds nothing but padding
def test_shards_together_equal_the_whole(world_size, padded):
    ranks = run_ranks(world_size, sharded, world_size, padded)
    hidden, weight, targets, gradient = inputs(padded)
    expected = torch.stack(plain_log_prob_and_entropy(hidden, weight, targets, 0.9, VOCAB), -1)
    grad_hidden, grad_weight = torch.autograd.grad((expected * gradient).sum(), (hidden, weight))
    for scored, *_ in ranks:
        assert relative_error(scored, expected.detach()) <= 1e-5
    assert relative_error(sum(part for _, part, _ in ranks), grad_hidden) <= 1e-5
    assert relative_error(torch.cat([part for *_, part in ranks]), grad_weight) <= 1e-5
