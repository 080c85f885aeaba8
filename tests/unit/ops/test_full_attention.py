"""Attention within documents equals attention over the whole pack with a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megarl.ops.full_attention import full_attention


@pytest.mark.parametrize("lengths", [(7,), (3, 3, 3), (5, 2, 2, 5, 1)])
def test_output_and_gradients_match_a_masked_pack(lengths):
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), 2, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = documents[:, None] == documents
    scores = torch.randn(sum(lengths), 2, 4, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in inputs), attn_mask=mask, scale=0.3)
    gradients = torch.autograd.grad((expected.transpose(0, 1) * scores).sum(), inputs)
    actual = full_attention(*inputs, lengths, scale=0.3)
    torch.testing.assert_close(actual, expected.transpose(0, 1))
    torch.testing.assert_close(torch.autograd.grad((actual * scores).sum(), inputs), gradients)


def test_queries_may_be_part_of_the_documents():
    torch.manual_seed(0)
    lengths, parts = (5, 2, 2, 5, 1), ((4, 0, 0, 0, 0), (1, 2, 2, 3, 0), (0, 0, 0, 2, 1))
    query, key, value = (torch.randn(sum(lengths), 2, 4, dtype=torch.float64) for _ in "qkv")
    queries = query.split(list(map(sum, parts)))
    actual = [
        full_attention(q, key, value, lengths, scale=0.3, query_lengths=part)
        for q, part in zip(queries, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(actual), full_attention(query, key, value, lengths, scale=0.3))
