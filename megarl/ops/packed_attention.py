"""Causal self-attention over packed documents that costs what the documents cost, in plain torch.

A mask over the whole pack would cost the square of the pack. Here documents of similar length are unpacked into one
padded batch, attended by torch's causal kernel, and packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

LENGTH_STEP = 16
"""Documents whose lengths round up to the same multiple share a batch: less than 16 padded positions each."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, D of them, the longest of S tokens.

    gather    int64 [D, S]: position in the pack; where a document is shorter than S, its last token stands again
    scatter   int64 [n]: positions in the flattened [D · S] whose output is kept
    tokens    int64 [n]: the position in the pack of each of them
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    tokens: torch.Tensor


def make_buckets(document_tokens: torch.Tensor, boundaries: torch.Tensor) -> tuple[Bucket, ...]:
    """As in TokenBatch. Computed once a microbatch, for all layers.

    A token that several documents share (a common prompt) has the same output in each of them, as it attends to
    nothing after it; the first document keeps it.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    kept = torch.zeros(int(document_tokens.max()) + 1, dtype=torch.bool)
    for document in document_tokens.cpu().tensor_split(boundaries[1:-1].long().cpu()):
        groups.setdefault(-(-len(document) // LENGTH_STEP), []).append(document)
    return tuple(_bucket(documents, kept, document_tokens.device) for _, documents in sorted(groups.items()))


def _bucket(documents: list[torch.Tensor], kept: torch.Tensor, device: torch.device) -> Bucket:
    """Marks in `kept` (bool [T]) the tokens whose output this bucket keeps."""
    longest = max(map(len, documents))
    gather = torch.stack([F.pad(d, (0, longest - len(d)), value=int(d[-1])) for d in documents])
    scatter = []
    for row, document in enumerate(documents):
        new = (~kept[document]).nonzero()[:, 0]
        kept[document] = True
        scatter.append(row * longest + new)
    places = torch.cat(scatter)
    return Bucket(gather.to(device), places.to(device), gather.flatten()[places].to(device))


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The twin: softmax under one mask over the whole pack, in which a token sees those before it in its documents."""
    num_tokens, heads_per_kv_head = query.shape[0], query.shape[1] // key.shape[1]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for document in document_tokens.tensor_split(boundaries[1:-1].long()):
        visible[document[:, None], document[None]] |= torch.ones(len(document), len(document)).tril().bool()
    key, value = (x.repeat_interleave(heads_per_kv_head, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value)
