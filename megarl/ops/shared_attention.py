"""Causal self-attention over a pack whose documents share tokens, in one kernel for the whole pack.

FlexAttention skips score blocks that the mask leaves empty. Compiled for a GPU, it never stores scores. Each shared
token is processed once, both as a query and as a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megarl.core.device import send

BLOCK = 128
"""Number of queries, and number of keys, in a block of scores."""


def pack_mask(
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    device: torch.device | None = None,
    window: int | None = None,
) -> BlockMask:
    """Return the attention mask for a pack. Call it once per microbatch; all layers use the result.

    Documents that share tokens form a tree, stored in the pack depth first: all continuations of a token directly
    follow it. A token is therefore visible to a contiguous range of tokens, from itself to the end of its last
    document. The block masks are computed from the ends of these ranges, without a mask whose size is quadratic in the
    pack length.

    Args:
        document_tokens, boundaries: as in TokenBatch.
        query_positions: int64 [n ≥ 1], pack positions of the tokens that are queries on this rank; None means all
            tokens, in order.
        key_positions: int64 [T], the pack position of each row in keys and values. Required with `query_positions`.
        device: device of the attention's inputs; by default, that of `document_tokens`.
        window: maximum number of tokens that a token attends to, including itself; None means no limit.
    """
    device, tokens, bounds = device or document_tokens.device, document_tokens.cpu(), boundaries.long().cpu()
    num_tokens, lengths = int(tokens.max()) + 1, bounds.diff()
    lasts = tokens[bounds[1:] - 1].repeat_interleave(lengths)
    ends = torch.zeros(num_tokens, dtype=torch.long).scatter_reduce(0, tokens, lasts + 1, "amax")
    positions = _positions(ends)
    in_documents = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(lengths)
    assert torch.equal(positions[tokens], in_documents), "documents are not packed depth first"
    is_whole = query_positions is None
    queries, keys = (torch.arange(num_tokens) if x is None else x.cpu() for x in (query_positions, key_positions))
    ends_of_keys, query_offsets, key_offsets = ends[keys], positions[queries], positions[keys]
    if is_whole:
        some, every = _blocks(ends, -(-num_tokens // BLOCK))
    else:
        some, every = _blocks_of_rows(ends_of_keys, queries, keys)
    if window is not None:
        some, every = _in_window(some, every, query_offsets, key_offsets, window)
    ends, query_places, key_places, query_offsets, key_offsets = (
        send(x.int(), device) for x in (ends_of_keys, queries, keys, query_offsets, key_offsets)
    )

    def is_visible(_batch, _head, query, key):
        query_place, key_place = (query, key) if is_whole else (query_places[query], key_places[key])
        visible = (key_place <= query_place) & (query_place < ends[key])
        return visible if window is None else visible & (query_offsets[query] - key_offsets[key] < window)

    rows = [*_listed(some & ~every), *_listed(every)]
    columns = [*_listed((some & ~every).T), *_listed(every.T)]
    return BlockMask(
        (len(queries), num_tokens),
        *(send(x, device) for x in rows + columns),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )


def _positions(ends: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its documents, int64 [T], if they are packed depth first: the token at position p
    attends to p + 1 tokens. `ends` is as in `_blocks`."""
    steps = torch.ones(len(ends) + 1, dtype=torch.long).index_add(0, ends, torch.tensor(-1).expand(len(ends)))
    return steps.cumsum(0)[:-1] - 1


def _blocks(ends: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks over blocks of queries × keys, bool [count, count] each: blocks with at least one visible pair,
    and blocks in which all pairs are visible. `ends`, int64 [T], holds the position after the last query that attends
    to each key, and `count` is the number of blocks per dimension."""
    # Consecutive keys with the same end form a rectangle of queries × keys. Its part above the diagonal is masked.
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (ends.diff() != 0).nonzero()[:, 0] + 1))
    stops = torch.cat((starts[1:], torch.tensor([len(ends)])))
    begins = torch.stack((starts, starts), 1)
    stops = torch.stack((ends[starts], stops), 1)
    some = _covered(begins // BLOCK, (stops - 1) // BLOCK + 1, count)
    every = _covered((begins - 1) // BLOCK + 1, stops // BLOCK, count)
    return some.tril(), every.tril(-1)


def _blocks_of_rows(ends: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masks of `_blocks` for rows in any order. The first mask may include blocks without a visible pair,
    because only the smallest and largest values in a block are compared.

    Args:
        ends: int64 [T], as in `_blocks`, by row of the keys.
        queries, keys: int64 [n] and int64 [T], the pack position of each row.
    """
    (first, last), (first_key, last_key), (first_end, last_end) = (_bounds(x) for x in (queries, keys, ends))
    first, last = first[:, None], last[:, None]
    some = (first_key <= last) & (first < last_end)
    every = (last_key <= first) & (last < first_end)
    every[len(queries) // BLOCK :] = every[:, len(keys) // BLOCK :] = False  # blocks cut off at the end are partial
    return some, every


def _in_window(
    some: torch.Tensor, every: torch.Tensor, query_offsets: torch.Tensor, key_offsets: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Restrict the masks of `_blocks`: the first to blocks in which some distance may be within the window, the second
    to blocks in which every distance is."""
    (least, most), (least_key, most_key) = _bounds(query_offsets), _bounds(key_offsets)
    return some & (least[:, None] - most_key < window), every & (most[:, None] - least_key < window)


def _bounds(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value in each block."""
    least, most = ([bound(block) for block in rows.split(BLOCK)] for bound in (torch.min, torch.max))
    return torch.stack(least), torch.stack(most)


def _covered(begins: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mask of cells covered by at least one rectangle, bool [count, count]. The rectangles span from
    `begins` to `ends`, both int64 [R, 2] (row, column)."""
    begins = begins.minimum(ends)  # empty rectangles must not cover anything
    steps = torch.zeros(count + 1, count + 1, dtype=torch.long)
    for (rows, columns), step in (
        ((begins[:, 0], begins[:, 1]), 1),
        ((ends[:, 0], ends[:, 1]), 1),
        ((begins[:, 0], ends[:, 1]), -1),
        ((ends[:, 0], begins[:, 1]), -1),
    ):
        steps.index_put_((rows, columns), torch.tensor(step), accumulate=True)
    return steps.cumsum(0).cumsum(1)[:count, :count] > 0


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of selected blocks in each row, int32 [1, 1, n], and each row's column indices with the
    selected blocks first, int32 [1, 1, n, n]."""
    # FlexAttention's kernel requires contiguous rows of indices.
    columns = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output, [T, heads, v]. query is [T, heads, d], key [T, kv heads, d] and value [T, kv heads,
    v]. The number of heads is a multiple of kv heads. `sinks`, [heads], are logits that each query's softmax includes,
    without a value vector, as in gpt-oss."""
    attended = _kernel(query.device.type)(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Otherwise packs shorter than a block would use a separately compiled decoding kernel.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        out = attended
    else:
        out, aux = attended
        keys_share = (aux.lse - sinks.float()[:, None]).sigmoid()  # the keys' share of the softmax's denominator
        out = out * keys_share[..., None].to(out.dtype)
    return out[0].transpose(0, 1)


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled once for packs of any length. On CPU, where FlexAttention has no backward kernel,
    return the eager version, which computes full matrix products over the whole pack."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)
