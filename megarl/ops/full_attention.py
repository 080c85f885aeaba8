"""Bidirectional attention within each document of a pack, in plain torch, at the same cost as one call per document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F


def full_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Return the attention output, [T, heads, d]. query, key and value have the same shape.

    Args:
        lengths: number of tokens in each document, in the order of the pack. Consecutive documents of equal length are
            processed as one batch, without padding.
    """
    runs = [(length, sum(1 for _ in documents)) for length, documents in groupby(lengths)]
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *parts in zip(runs, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in parts)
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
