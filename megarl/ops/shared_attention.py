"""Computes causal self-attention over a pack whose documents share tokens, where one kernel takes the whole pack.

FlexAttention skips blocks of the scores that a mask leaves empty. Compiled for a GPU, it never stores scores, and what
documents share is computed once, queries included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""The queries and the keys of a block of scores."""


def pack_mask(document_tokens: torch.Tensor, boundaries: torch.Tensor) -> BlockMask:
    """Return which tokens of a pack see which, computed once a microbatch, for all layers.

    document_tokens, boundaries   as in TokenBatch

    Documents that share tokens are a tree, which stands in the pack depth first: whatever goes on from a token follows
    it, before anything that does not. So a token is seen by those from itself to the end of the last of its documents,
    and whole blocks follow from these ends, without the square of the pack.
    """
    device, tokens, bounds = document_tokens.device, document_tokens.cpu(), boundaries.long().cpu()
    num_tokens, lengths = int(tokens.max()) + 1, bounds.diff()
    lasts = tokens[bounds[1:] - 1].repeat_interleave(lengths)
    ends = torch.zeros(num_tokens, dtype=torch.long).scatter_reduce(0, tokens, lasts + 1, "amax")
    _check_order(tokens, bounds, ends)
    some, every = _blocks(ends, -(-num_tokens // BLOCK))
    ends = ends.int().to(device)

    def is_visible(_batch, _head, query, key):
        return (key <= query) & (query < ends[key])

    rows = [*_listed(some & ~every), *_listed(every)]
    columns = [*_listed((some & ~every).T), *_listed(every.T)]
    return BlockMask(
        (num_tokens, num_tokens),
        *(x.to(device) for x in rows + columns),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )


def _check_order(tokens: torch.Tensor, bounds: torch.Tensor, ends: torch.Tensor) -> None:
    """Check that each token is to see as many as there are in its document up to it."""
    steps = torch.ones(len(ends) + 1, dtype=torch.long).index_add(0, ends, torch.tensor(-1).expand(len(ends)))
    in_document = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(bounds.diff())
    assert torch.equal(steps.cumsum(0)[tokens], in_document + 1), "documents are not in the pack depth first"


def _blocks(ends: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bool [count, count]: the blocks of queries and keys of which any see each other, and all do.

    ends   int64 [T]: the token after the last that sees each
    """
    # Keys that follow each other and are seen up to the same token are a rectangle of queries and keys, of which the
    # part up to the diagonal counts.
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (ends.diff() != 0).nonzero()[:, 0] + 1))
    stops = torch.cat((starts[1:], torch.tensor([len(ends)])))
    begins = torch.stack((starts, starts), 1)
    stops = torch.stack((ends[starts], stops), 1)
    some = _covered(begins // BLOCK, (stops - 1) // BLOCK + 1, count)
    every = _covered((begins - 1) // BLOCK + 1, stops // BLOCK, count)
    return some.tril(), every.tril(-1)


def _covered(begins: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool [count, count]: the cells in any of the rectangles whose rows and columns begin and end so, both
    int64 [R, 2]."""
    begins = begins.minimum(ends)  # none, where nothing is inside
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
    """Return how many blocks each row has, int32 [1, 1, n], and their columns first among all, int32 [1, 1, n, n]."""
    # The kernel reads rows whose elements follow each other.
    columns = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def shared_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Return the attended values, [T, heads, v].

    query [T, heads, d], key [T, kv heads, d], value [T, kv heads, v], heads a multiple of kv heads.
    """
    out = _kernel(query.device.type)(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Packs of fewer tokens than a block would else be computed by a kernel for decoding, compiled for them alone.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return out[0].transpose(0, 1)


@cache
def _kernel(device: str) -> Callable[..., torch.Tensor]:
    """Return FlexAttention, compiled once for packs of all lengths; on CPU, where it has no kernel for the backward
    pass, as torch's plain products of the whole pack."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)
