"""Causal self-attention over a pack whose documents share tokens, in one kernel for the whole pack.

FlexAttention skips score blocks that the mask leaves empty. Compiled for a GPU, it never stores scores. Shared tokens
are processed once, even as queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megarl.core.device import send

BLOCK = 128
"""Number of queries, and number of keys, in a block of scores."""


def pack_mask(document_tokens: torch.Tensor, boundaries: torch.Tensor, device: torch.device | None = None) -> BlockMask:
    """Return the attention mask for a pack. Call it once per microbatch; all layers use the result.

    Documents that share tokens form a tree, stored in the pack depth first: all continuations of a token directly
    follow it. A token is therefore visible to a contiguous range of tokens, from itself to the end of its last
    document. The block masks are computed from the ends of these ranges, without a mask whose size is quadratic in the
    pack length.

    Args:
        document_tokens, boundaries: as in TokenBatch.
        device: device of the attention's inputs; by default, that of `document_tokens`.
    """
    device, tokens, bounds = device or document_tokens.device, document_tokens.cpu(), boundaries.long().cpu()
    num_tokens, lengths = int(tokens.max()) + 1, bounds.diff()
    lasts = tokens[bounds[1:] - 1].repeat_interleave(lengths)
    ends = torch.zeros(num_tokens, dtype=torch.long).scatter_reduce(0, tokens, lasts + 1, "amax")
    _check_order(tokens, bounds, ends)
    some, every = _blocks(ends, -(-num_tokens // BLOCK))
    ends = send(ends.int(), device)

    def is_visible(_batch, _head, query, key):
        return (key <= query) & (query < ends[key])

    rows = [*_listed(some & ~every), *_listed(every)]
    columns = [*_listed((some & ~every).T), *_listed(every.T)]
    return BlockMask(
        (num_tokens, num_tokens),
        *(send(x, device) for x in rows + columns),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )


def _check_order(tokens: torch.Tensor, bounds: torch.Tensor, ends: torch.Tensor) -> None:
    """Assert that documents are packed depth first: the token at position p in its document attends to p + 1 tokens."""
    steps = torch.ones(len(ends) + 1, dtype=torch.long).index_add(0, ends, torch.tensor(-1).expand(len(ends)))
    in_document = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(bounds.diff())
    assert torch.equal(steps.cumsum(0)[tokens], in_document + 1), "documents are not packed depth first"


def _blocks(ends: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks over blocks of queries × keys, bool [count, count] each: blocks with at least one visible pair,
    and blocks in which all pairs are visible. `ends`, int64 [T], holds the position after the last query that attends
    to each key, and `count` is the number of blocks per dimension."""
    # Consecutive keys with the same end form a rectangle of queries × keys. Only its part up to the diagonal counts.
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (ends.diff() != 0).nonzero()[:, 0] + 1))
    stops = torch.cat((starts[1:], torch.tensor([len(ends)])))
    begins = torch.stack((starts, starts), 1)
    stops = torch.stack((ends[starts], stops), 1)
    some = _covered(begins // BLOCK, (stops - 1) // BLOCK + 1, count)
    every = _covered((begins - 1) // BLOCK + 1, stops // BLOCK, count)
    return some.tril(), every.tril(-1)


def _covered(begins: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mask of cells covered by at least one rectangle, bool [count, count]. The rectangles span from
    `begins` to `ends`, both int64 [R, 2] (row, column)."""
    begins = begins.minimum(ends)  # makes empty rectangles cover nothing
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
    # The kernel requires contiguous rows.
    columns = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def shared_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Return the attention output, [T, heads, v]. query is [T, heads, d], key [T, kv heads, d] and value [T, kv heads,
    v]. The number of heads is a multiple of kv heads."""
    out = _kernel(query.device.type)(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Otherwise packs shorter than a block would use a separately compiled decoding kernel.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return out[0].transpose(0, 1)


@cache
def _kernel(device: str) -> Callable[..., torch.Tensor]:
    """Return FlexAttention, compiled once for packs of any length. On CPU, where FlexAttention has no backward kernel,
    return the eager version, which computes full matrix products over the whole pack."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)
