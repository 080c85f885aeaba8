"""Causal self-attention over packed documents that costs what the documents cost, in plain torch.

A mask over the whole pack would cost the square of the pack. Here documents of similar length are unpacked into one
padded batch, attended by torch's causal kernel, and packed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

LENGTH_STEP = 16
"""Documents whose lengths round up to the same multiple share a batch: less than 16 padded positions each."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, D of them, the longest of S tokens.

    gather    int64 [D, S]: position in the pack; where a document is shorter than S, its last token stands again
    scatter   int64 [tokens]: position in the flattened [D · S] of each token of these documents, document by document
    tokens    int64 [tokens]: position in the pack of the same tokens
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    tokens: torch.Tensor


def make_buckets(boundaries: torch.Tensor) -> tuple[Bucket, ...]:
    """boundaries: int32 [D + 1], cumulative lengths; documents of length 0 are allowed. Computed once a microbatch."""
    groups: dict[int, list[tuple[int, int]]] = {}
    edges = boundaries.tolist()
    for start, stop in pairwise(edges):
        if stop > start:
            groups.setdefault(-(-(stop - start) // LENGTH_STEP), []).append((start, stop - start))
    return tuple(_bucket(documents, boundaries.device) for _, documents in sorted(groups.items()))


def _bucket(documents: list[tuple[int, int]], device: torch.device) -> Bucket:
    starts = torch.tensor([start for start, _ in documents], device=device)
    lengths = torch.tensor([length for _, length in documents], device=device)
    offsets = torch.arange(int(lengths.max()), device=device)
    inside = offsets[None] < lengths[:, None]
    gather = starts[:, None] + torch.minimum(offsets[None], lengths[:, None] - 1)
    return Bucket(gather, inside.flatten().nonzero()[:, 0], gather[inside])


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    buckets: tuple[Bucket, ...],
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """query [T, heads, d], key and value [T, kv heads, d], heads a multiple of kv heads. Returns [T, heads, d]."""
    out = torch.zeros_like(query)
    for bucket in buckets:
        q, k, v = (x[bucket.gather].transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
        )
        rows = attended.transpose(1, 2).flatten(0, 1)[bucket.scatter]
        out = out.index_copy(0, bucket.tokens, rows)
    return out


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, scale: float
) -> torch.Tensor:
    """The twin: softmax under one block-diagonal causal mask over the whole pack."""
    num_tokens, heads_per_kv_head = query.shape[0], query.shape[1] // key.shape[1]
    position = torch.arange(num_tokens, device=query.device)
    document = torch.bucketize(position, boundaries[1:].to(position.dtype), right=True)
    visible = (document[:, None] == document[None]) & (position[None] <= position[:, None])
    key, value = (x.repeat_interleave(heads_per_kv_head, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value)
