"""The head with sharded weights against full logits of the whole weight."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megarl.ops import head_tile, output_layer
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import assert_matches
from tests.forked import run_ranks
from tests.timing import RANKS_S

TOKENS, HIDDEN = 37, 16
SIZES = [(100, 102), (100, 180), (7, 12), (101, 150)]
"""Vocabulary size, without and with padding. In the second pair, one rank holds only padding."""


def inputs(vocab: int, padded: int, dtype: torch.dtype):
    """Return random inputs that dtype can represent, and random gradients for the outputs."""
    generator = torch.Generator().manual_seed(vocab + padded)
    parts = [torch.randn(n, HIDDEN, generator=generator) / 4 for n in (TOKENS, padded)]
    hidden, weight, bias = (
        part.to(dtype).requires_grad_() for part in (*parts, torch.randn(padded, generator=generator))
    )
    # Each row has at most five candidates from the whole vocabulary, so some shards have none or lack the target. Every
    # third row keeps all tokens.
    candidate_ids = torch.randint(-vocab, vocab, (TOKENS, 5), generator=generator).clamp(min=-1)
    candidate_ids[::3] = -1
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "targets": torch.randint(vocab, (TOKENS,), generator=generator),
        "temperature": torch.rand(TOKENS, generator=generator) + 0.5,
        "candidate_ids": candidate_ids,
    }, torch.randn(TOKENS, 2, generator=generator)


def variant(whole_inputs: dict, truncated: bool) -> dict:
    return whole_inputs if truncated else whole_inputs | {"bias": None, "temperature": 0.9, "candidate_ids": None}


def sharded(store, rank: int, world_size: int, dtype: torch.dtype) -> list[tuple]:
    """Return this rank's value, its part of the hidden gradient and its own gradients, by size and variant."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=RANKS_S))
    output_layer.CPU_TILE, head_tile.BLOCK = (16, 24), 100
    results = []
    for vocab, padded in SIZES:
        for truncated in (False, True):
            whole_inputs, gradient = inputs(vocab, padded, dtype)
            for name in ("weight", "bias"):
                whole_inputs[name] = whole_inputs[name].detach().chunk(world_size)[rank].clone().requires_grad_()
            own = variant(whole_inputs, truncated)
            scored = log_prob_and_entropy(**own, vocab_size=vocab, process_group=dist.group.WORLD)
            (scored * gradient).sum().backward()
            bias_grad = own["bias"].grad if truncated else torch.zeros(0)
            gradients = (own["hidden"].grad.float(), own["weight"].grad.float(), bias_grad.float())
            results.append((scored.detach(), *gradients))
    return results


def whole(size: tuple[int, int], drawn: tuple[dict, torch.Tensor], truncated: bool) -> dict[str, torch.Tensor]:
    """Return the value and gradients of the whole head, computed in the default dtype."""
    whole_inputs, gradient = dict(drawn[0]), drawn[1]
    for name in ("hidden", "weight", "bias"):
        whole_inputs[name] = whole_inputs[name].detach().to(torch.get_default_dtype(), copy=True).requires_grad_()
    value = torch.stack(plain_log_prob_and_entropy(**variant(whole_inputs, truncated), vocab_size=size[0]), -1)
    (value * gradient).sum().backward()
    trained = ("hidden", "weight", "bias") if truncated else ("hidden", "weight")
    return {"value": value.detach()} | {name: whole_inputs[name].grad for name in trained}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_head_equals_the_whole_head(world_size, dtype):
    ranks = run_ranks(world_size, sharded, world_size, dtype)
    variants = [(size, truncated) for size in SIZES for truncated in (False, True)]
    for (size, truncated), *own in zip(variants, *ranks, strict=True):
        scored, hidden, weight, bias = zip(*own, strict=True)
        shared = {"hidden": sum(hidden), "weight": torch.cat(weight)} | ({"bias": torch.cat(bias)} if truncated else {})
        shared = {name: gradient.to(dtype) for name, gradient in shared.items()}
        reference = partial(whole, size, inputs(*size, dtype), truncated)
        for value in scored:
            assert_matches(shared | {"value": value}, reference, f"{size}")
