"""Single-kernel attention over packs with shared prompts, compared with a dense mask over the pack."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from megarl.ops import shared_attention
from megarl.ops.shared_attention import pack_mask
from tests.attention_reference import assert_matches_plain
from tests.marks import each_value
from tests.packing import Trees, documents

PACKS: dict[str, Trees] = {
    "one token": [(1, [0])],
    "unshared prompt": [(5, [1])],
    "shorter than a block": [(3, [3, 24, 1]), (1, [2])],
    "whole blocks": [(128, [128, 128, 256])],
    "turns and branches": [(100, [(60, [(128, [30, 200]), 0, (256, [(1, [5, 128])])]), 70]), (40, [300])],
    "blocks of several documents": [(200, [100, 150, 1, 128]), (56, [72, 0, 128]), (1, [200])],
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Allow FlexAttention's eager implementation, which has a gradient, on CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "dims", "window", "has_sinks"),
    each_value([*PACKS], [(1, 16), (2, 16), (6, 16), (6, 10), (2, 24)], [None, 1, 20, 128, 250], [False, True]),
)
def test_matches_masked_attention(name, dims, window, has_sinks):
    """dims: the number of KV heads, and the number of channels in a value."""
    kv_heads, value_dim = dims
    torch.manual_seed(0)
    tokens, boundaries = documents(PACKS[name])
    num_tokens = int(tokens.max()) + 1
    query = torch.randn(num_tokens, 6, 16, requires_grad=True)
    key, value = (torch.randn(num_tokens, kv_heads, dim, requires_grad=True) for dim in (16, value_dim))
    gradient = torch.randn(num_tokens, 6, value_dim)
    sinks = torch.randn(6, requires_grad=True) if has_sinks else None
    mask = pack_mask(tokens, boundaries, window=window)
    actual = shared_attention.shared_attention(query, key, value, mask, 0.3, sinks)
    assert_matches_plain(actual, (query, key, value, sinks), gradient, tokens, boundaries, 0.3, window)


def shares(num_tokens: int, size: int, is_strided: bool) -> list[torch.Tensor]:
    """Return each rank's pack positions: every size-th token, or two chunks as in Transformer Engine."""
    positions = torch.arange(num_tokens)
    if is_strided:
        return [positions[rank::size] for rank in range(min(size, num_tokens))]
    chunks = positions.tensor_split(2 * size)
    return [rows for rank in range(size) if len(rows := torch.cat((chunks[rank], chunks[-1 - rank])))]


@pytest.mark.parametrize(
    ("name", "size", "is_strided", "window", "has_sinks"),
    each_value([*PACKS], [2, 3], [False, True], [None, 1, 20, 250], [False, True]),
)
def test_queries_on_several_ranks_match_masked_attention(name, size, is_strided, window, has_sinks):
    torch.manual_seed(0)
    tokens, boundaries = documents(PACKS[name])
    num_tokens = int(tokens.max()) + 1
    query, key, value = (torch.randn(num_tokens, 2, 16, requires_grad=True) for _ in range(3))
    gradient, sinks = torch.randn(num_tokens, 2, 16), torch.randn(2, requires_grad=True) if has_sinks else None
    ranks = shares(num_tokens, size, is_strided)
    key_positions, actual = torch.cat(ranks), torch.zeros_like(query)
    for query_positions in ranks:
        mask = pack_mask(tokens, boundaries, query_positions, key_positions, window=window)
        rows = query[query_positions], key[key_positions], value[key_positions]
        out = shared_attention.shared_attention(*rows, mask, 0.3, sinks)
        actual = actual.index_copy(0, query_positions, out)
    assert_matches_plain(actual, (query, key, value, sinks), gradient, tokens, boundaries, 0.3, window)


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("window", [None, 20, 250])
def test_blocks_of_a_rank_contain_the_dense_mask(name, is_strided, window):
    tokens, boundaries = documents(PACKS[name])
    ranks = shares(int(tokens.max()) + 1, 2, is_strided)
    for positions in ranks:
        mask = pack_mask(tokens, boundaries, positions, torch.cat(ranks), window=window)
        expected = create_block_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device="cpu")
        assert (mask.to_dense() >= expected.to_dense()).all()
        assert (whole(mask, "kv") <= whole(expected, "kv")).all()
        for kind in ("", "full_"):
            assert torch.equal(whole(mask, "kv", kind), whole(mask, "q", kind).T)


def test_blocks_outside_a_window_are_skipped_on_every_rank():
    """Each rank attends to at most three blocks of keys per chunk and block of queries, however long the document."""
    tokens, boundaries = documents([(4096, [0])])
    ranks = shares(4096, 2, is_strided=False)
    for positions in ranks:
        mask = pack_mask(tokens, boundaries, positions, torch.cat(ranks), window=128)
        assert whole(mask, "kv", "").sum(1).max() <= 3
        # Tokens of two neighboring blocks are at most 255 apart.
        for window, has_full_blocks in ((255, False), (256, True)):
            mask = pack_mask(tokens, boundaries, positions, torch.cat(ranks), window=window)
            assert bool(whole(mask, "kv").any()) == has_full_blocks


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("window", [None, 20, 128, 250])
def test_blocks_match_the_dense_mask(name, window):
    """The kernel skips unlisted blocks and does not mask blocks listed as full."""
    mask = pack_mask(*documents(PACKS[name]), window=window)
    num_tokens = mask.seq_lengths[0]
    expected = create_block_mask(mask.mask_mod, 1, 1, num_tokens, num_tokens, device="cpu")
    # With a window, empty blocks may be listed, because only the lowest and highest positions of a block are compared.
    assert (mask.to_dense() >= expected.to_dense()).all()
    assert window is not None or torch.equal(mask.to_dense(), expected.to_dense())
    assert (whole(mask, "kv") <= whole(expected, "kv")).all()
    for kind in ("", "full_"):
        assert torch.equal(whole(mask, "kv", kind), whole(mask, "q", kind).T)


def whole(mask, side: str, kind: str = "full_") -> torch.Tensor:
    """Return bool [blocks, blocks]: the listed blocks, by rows of queries (kv) or keys (q)."""
    counts, indices = (getattr(mask, f"{kind}{side}_{what}")[0, 0] for what in ("num_blocks", "indices"))
    assert indices.is_contiguous()  # required by the kernel
    listed = torch.arange(indices.shape[1]) < counts[:, None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(1, indices.long(), listed)


def test_full_blocks_are_listed():
    assert whole(pack_mask(*documents(PACKS["whole blocks"])), "kv").int().tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0],
    ]


def test_documents_must_be_packed_depth_first():
    with pytest.raises(AssertionError, match="documents are not packed depth first"):
        pack_mask(torch.tensor([0, 1, 2, 0, 3]), torch.tensor([0, 2, 3, 5]))


def test_kernel_is_compiled_once_for_all_lengths(monkeypatch):
    """A compilation takes a minute. Packs of a single block need another one."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    kernel = shared_attention._kernel.__wrapped__("cuda")
    monkeypatch.setattr(shared_attention, "_kernel", lambda device: kernel)
    compiled = []
    for response in (100, 300, 56, 421, 640):
        mask = pack_mask(*documents([(200, [30, response, 1])]))
        query, key = (torch.randn(mask.seq_lengths[0], heads, 16, requires_grad=True) for heads in (4, 2))
        shared_attention.shared_attention(query, key, key, mask, 0.3).sum().backward()
        compiled.append(counter.frame_count)
    assert compiled[0] > 0 and len(set(compiled)) == 1
