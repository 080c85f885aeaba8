"""Packed attention compared with a dense mask over the pack, in value and gradient."""

from itertools import chain

import pytest
import torch

from megarl.ops.packed_attention import documents_of, packed_attention, take
from tests.attention_reference import assert_matches_plain


def separate(lengths: list[int]) -> list[list[int]]:
    """Return consecutive documents of these lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


DOCUMENTS = {
    "one token": separate([1]),
    "many lengths": separate([7, 1, 40, 16, 17, 33]),
    "equal lengths": separate([5] * 6),
    "shared prompt": [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, *range(6, 30)],
        [0, 1, 2, 30],
        [31, 32],
    ],
}


def tensors(documents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(chain.from_iterable(documents))), torch.tensor([0, *map(len, documents)]).cumsum(0).int()


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(1, 8), (2, 8), (6, 8), (6, 5), (2, 12)])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_matches_masked_attention(name, kv_heads, value_dim, window, has_sinks):
    torch.manual_seed(0)
    tokens, boundaries = tensors(DOCUMENTS[name])
    num_tokens = int(tokens.max()) + 1
    query = torch.randn(num_tokens, 6, 8, requires_grad=True)
    key, value = (torch.randn(num_tokens, kv_heads, dim, requires_grad=True) for dim in (8, value_dim))
    gradient = torch.randn(num_tokens, 6, value_dim)
    sinks = torch.randn(6, requires_grad=True) if has_sinks else None
    documents = documents_of(tokens, boundaries, window=window)
    actual = packed_attention(query, key, value, documents, 0.3, sinks=sinks)
    assert_matches_plain(actual, (query, key, value, sinks), gradient, tokens, boundaries, 0.3, window)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_queries_on_several_ranks_match_masked_attention(name, size, window):
    """The output of every token is the same on any rank and in any order."""
    torch.manual_seed(0)
    tokens, boundaries = tensors(DOCUMENTS[name])
    num_tokens = int(tokens.max()) + 1
    query, key, value = (torch.randn(num_tokens, 2, 8, requires_grad=True) for _ in range(3))
    gradient, sinks = torch.randn(num_tokens, 2, 8), torch.randn(2, requires_grad=True)
    key_positions, actual = torch.randperm(num_tokens), torch.zeros_like(query)
    for query_positions in key_positions.tensor_split(min(size, num_tokens)):
        documents = documents_of(tokens, boundaries, query_positions, key_positions, window=window)
        rows = query[query_positions], key[key_positions], value[key_positions]
        actual = actual.index_copy(0, query_positions, packed_attention(*rows, documents, 0.3, sinks=sinks))
    assert_matches_plain(actual, (query, key, value, sinks), gradient, tokens, boundaries, 0.3, window)


def test_padding_is_less_than_one_step_per_document():
    lengths = torch.randint(1, 200, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    padded = len(documents_of(*tensors(separate(lengths))).keys)
    assert padded - sum(lengths) < 16 * len(lengths)


def test_gradients_are_deterministic():
    """Rows that occur several times, as in a shared prompt, are summed in the same order in every run."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows, index = torch.randn(300, 576, requires_grad=True), torch.randint(0, 300, (64, 90))
        gradient = torch.randn(64, 90, 576)
        first = torch.autograd.grad(take(rows, index), rows, gradient)[0]
        for _ in range(20):
            assert torch.equal(torch.autograd.grad(take(rows, index), rows, gradient)[0], first)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(first, torch.autograd.grad(rows[index], rows, gradient)[0])
