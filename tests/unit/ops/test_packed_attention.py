"""Attention by documents against one mask over the pack, in value and gradient."""

import pytest
import torch

from megarl.ops.packed_attention import make_buckets, packed_attention, plain_attention


@pytest.mark.parametrize("lengths", [[1], [7, 1, 40, 16, 17, 0, 33], [5] * 6, [100]])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_equals_one_mask_over_the_pack(lengths, kv_heads):
    torch.manual_seed(0)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    num_tokens = int(boundaries[-1])
    query = torch.randn(num_tokens, 6, 8, requires_grad=True)
    key, value = (torch.randn(num_tokens, kv_heads, 8, requires_grad=True) for _ in range(2))
    gradient = torch.randn(num_tokens, 6, 8)
    expected = plain_attention(query, key, value, boundaries, 0.3)
    ours = packed_attention(query, key, value, make_buckets(boundaries), 0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours, (query, key, value), gradient),
        torch.autograd.grad(expected, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_padding_stays_below_one_step_per_document():
    lengths = torch.randint(1, 200, (50,), generator=torch.Generator().manual_seed(0))
    boundaries = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int()
    padded = sum(bucket.gather.numel() for bucket in make_buckets(boundaries))
    assert padded - int(lengths.sum()) < 16 * len(lengths)
