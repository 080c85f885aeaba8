"""Computes causal self-attention over a pack whose documents share prompts, where one kernel takes the whole pack.

FlexAttention skips blocks of the scores that a mask leaves empty. Compiled for a GPU, it never stores scores, and a
prompt's tokens are computed once, queries among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""The queries and the keys of a block of scores."""


def pack_mask(document_tokens: torch.Tensor, boundaries: torch.Tensor) -> BlockMask:
    """Returns which tokens of a pack see which, computed once a microbatch, for all layers.

    document_tokens, boundaries   as in TokenBatch

    A document is a run of tokens, after a prompt that may stand apart, before it. A token sees its own run up to
    itself, and all of the prompt. So whole blocks follow from the runs' ends, without the square of the pack.
    """
    device, tokens = document_tokens.device, document_tokens.cpu()
    runs, lengths = _runs(tokens, boundaries.long().cpu())
    num_tokens = int(tokens.max()) + 1
    # Of a token that several documents share, all say the same.
    first, prompt_start, prompt_end = (
        torch.empty(num_tokens, dtype=torch.int32).index_copy(0, tokens, of_run.int().repeat_interleave(lengths))
        for of_run in (runs[:, 0], runs[:, 2], runs[:, 3])
    )
    some, every = _blocks(runs, -(-num_tokens // BLOCK))
    first, prompt_start, prompt_end = (x.to(device) for x in (first, prompt_start, prompt_end))

    def is_visible(_batch, _head, query, key):
        own = (first[query] <= key) & (key <= query)
        return own | ((prompt_start[query] <= key) & (key < prompt_end[query]))

    rows = [*_listed(some & ~every), *_listed(every)]
    columns = [*_listed((some & ~every).T), *_listed(every.T)]
    return BlockMask(
        (num_tokens, num_tokens),
        *(x.to(device) for x in rows + columns),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )


def _runs(tokens: torch.Tensor, boundaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int64 [R, 4]: begin and end of each run of the documents, and those of the prompt apart that it sees (0
    and 0: none); and their lengths."""
    breaks = (tokens.diff() != 1).nonzero()[:, 0] + 1
    starts = torch.cat((boundaries[:-1], breaks)).unique()
    starts = starts[starts < len(tokens)]
    lengths = torch.cat((starts[1:], boundaries[-1:])) - starts
    begins = tokens[starts]
    own = torch.stack((begins, begins + lengths), 1)
    is_first = torch.isin(starts, boundaries)
    assert not (~is_first[1:] & ~is_first[:-1]).any(), "a document of more than a prompt and a response"
    return torch.cat((own, torch.where(is_first[:, None], 0, own.roll(1, dims=0))), 1), lengths


def _blocks(runs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two bool [count, count]: the blocks of queries and keys of which any see each other, and all do."""
    # Each run is a rectangle of queries and keys, of which the part up to the diagonal counts; its prompt is another.
    apart = runs[runs[:, 3] > 0]
    corners = torch.cat((runs[:, [0, 1, 0, 1]], apart)).view(-1, 2, 2)
    begins, ends = corners.unbind(-1)
    some = _covered(begins // BLOCK, (ends - 1) // BLOCK + 1, count)
    every = _covered((begins - 1) // BLOCK + 1, ends // BLOCK, count)
    return some.tril(), every.tril(-1)


def _covered(begins: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Returns bool [count, count]: the cells in any of the rectangles whose rows and columns begin and end so, both
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
    """Returns how many blocks each row has, int32 [1, 1, n], and their columns first among all, int32 [1, 1, n, n]."""
    # The kernel reads rows whose elements follow each other.
    columns = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def shared_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Returns the attended values, [T, heads, v].

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
    """Returns FlexAttention, compiled once for packs of all lengths; on CPU, where it has no kernel for the backward
    pass, as torch's plain products of the whole pack."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)
