"""Bidirectional attention within each document of a pack, in plain torch, at the same cost as one call per document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F


def full_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    query_lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the attention output, [n, heads, d]. query has this shape; key and value are [T, heads, d].

    Args:
        lengths: number of tokens in each document, in the order of the pack. Consecutive documents of equal length are
            processed as one batch, without padding.
        query_lengths: number of queries in each document, with sum n ≥ 1; None means all tokens.
    """
    pairs = zip(lengths if query_lengths is None else query_lengths, lengths, strict=True)
    runs = [(*pair, sum(1 for _ in documents)) for pair, documents in groupby(pairs)]
    queries = query.split([num_queries * count for num_queries, _, count in runs])
    keys, values = (x.split([length * count for _, length, count in runs]) for x in (key, value))
    outputs = []
    for (num_queries, _, count), *parts in zip(runs, queries, keys, values, strict=True):
        if num_queries:
            q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
            outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
