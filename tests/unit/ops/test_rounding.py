"""The trainer computes in bfloat16 what vLLM's own kernels compute, to the last bit: where one of them rounded at
another place, each layer would take them further apart."""

from __future__ import annotations

import pytest
import torch
import vllm._C  # noqa: F401  registers the kernels
from vllm import _custom_ops as kernels

from megarl.megatron.model.layer_spec import RMSNorm
from megarl.megatron.model.rope import rotate
from megarl.ops.packed_attention import documents_of, packed_attention
from megarl.ops.swiglu import swiglu

TOKENS, HEADS, KV_HEADS, DIM = 48, 9, 3, 64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_gated_activation():
    given, expected = random(TOKENS, 2 * 96), torch.empty(TOKENS, 96, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(expected, given)
    assert torch.equal(swiglu(given), expected)


@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
def test_the_rotary_embedding(rotated):
    query, key = random(TOKENS, HEADS, DIM), random(TOKENS, KV_HEADS, DIM, seed=1)
    positions = torch.arange(TOKENS) * 37
    angles = positions[:, None] / 10000 ** (torch.arange(0, rotated, 2) / rotated)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    expected = [query.reshape(TOKENS, -1).clone(), key.reshape(TOKENS, -1).clone()]
    table = torch.zeros(int(positions.max()) + 1, rotated).index_copy(0, positions, table).bfloat16()
    torch.ops._C.rotary_embedding(positions, *expected, DIM, table, True)
    turned = torch.cat((angles, angles), -1)[:, None, None]
    for ours, theirs in zip((query, key), expected, strict=True):
        assert torch.equal(rotate(ours[:, None], turned)[:, 0], theirs.view_as(ours))


def test_attention():
    query, key, value = (random(TOKENS, heads, DIM, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    value = value.flip(0)
    documents = documents_of(torch.arange(TOKENS), torch.tensor([0, TOKENS]))
    cache = [torch.zeros(1, KV_HEADS, 64, DIM, dtype=torch.bfloat16) for _ in range(2)]
    kernels.cpu_attn_reshape_and_cache(key, value, *cache, torch.arange(TOKENS), "vec")
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, TOKENS], [TOKENS]))
    plan = kernels.cpu_attn_get_scheduler_metadata(
        1, HEADS, KV_HEADS, DIM, lengths, torch.bfloat16, starts, True, -1, "vec", False
    )
    expected, blocks = torch.empty_like(query), torch.zeros(1, 1, dtype=torch.int32)
    kernels.cpu_attention_with_kv_cache(
        query, *cache, expected, starts, lengths, DIM**-0.5, True, None, -1, blocks, 0.0, plan, None
    )
    ours = packed_attention(query, key, value, documents, DIM**-0.5)
    assert (ours != expected).float().mean() < 0.001  # sums of float32 are of another order


def test_the_norm():
    given, weight = random(TOKENS, 96), random(96, seed=1)
    expected = torch.empty_like(given)
    torch.ops._C.rms_norm(expected, given, weight, 1e-5)
    norm = RMSNorm.__new__(RMSNorm)
    torch.nn.RMSNorm.__init__(norm, 96, eps=1e-5, dtype=torch.bfloat16)
    norm.weight.data.copy_(weight)
    assert torch.equal(norm(given), expected)
