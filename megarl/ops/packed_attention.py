"""Causal self-attention over packed documents in plain torch, at the cost of separate attention per document.

With a mask over the whole pack, the cost would grow with the square of the pack length. Instead, documents of similar
length are unpacked into a padded batch, processed by torch's causal kernel, and packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

LENGTH_STEP = 16
"""Bucket width in tokens. Documents whose lengths round up to the same multiple share a batch, with fewer than 16
padding positions each."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """D documents of similar length: at most S tokens and at most Q queries each.

    Attributes:
        keys: int64 [D, S], indices of each document's keys and values. Shorter documents repeat their last token.
        queries: int64 [D, Q], indices of each document's queries. Documents with fewer queries repeat their last query.
        visible: bool [D, 1, Q, S], the keys that each query attends to. None means Q = S and a causal mask.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    visible: torch.Tensor | None

    def to(self, device: torch.device) -> Bucket:
        visible = None if self.visible is None else self.visible.to(device)
        return Bucket(self.keys.to(device), self.queries.to(device), visible)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents in a pack. Each document is in one bucket. `outputs`, int64 [n], holds the index of each query's
    output in the flattened and concatenated bucket outputs."""

    buckets: tuple[Bucket, ...]
    outputs: torch.Tensor


def documents_of(
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
) -> Documents:
    """Return the documents in a pack. Call it once per microbatch; all layers use the result.

    A token shared by several documents, such as a common prompt, has the same output in each document because attention
    is causal. It is a query only in the first of these documents.

    Args:
        document_tokens, boundaries: as in TokenBatch.
        query_positions: int64 [n ≥ 1], pack positions of the tokens that are queries on this rank; None means all
            tokens, in order.
        key_positions: int64 [T], the pack position of each row in keys and values. Required with `query_positions`.
    """
    device = document_tokens.device
    num_tokens = int(document_tokens.max()) + 1
    documents = document_tokens.cpu().tensor_split(boundaries[1:-1].long().cpu())
    members_by_shape: dict[tuple[bool, int], list[_Document]] = {}
    unclaimed = torch.ones(num_tokens, dtype=torch.bool)
    query_index, key_index = (_inverse(places, num_tokens) for places in (query_positions, key_positions))
    for places in documents:
        document = _Document(places, query_index, key_index, unclaimed)
        unclaimed[places] = False
        if len(document.queries):
            members_by_shape.setdefault((document.is_whole, -(-len(places) // LENGTH_STEP)), []).append(document)
    ordered = [members for _, members in sorted(members_by_shape.items())]
    buckets = [_bucket(members) for members in ordered]
    tokens = torch.cat([bucket.queries.flatten() for bucket in buckets])
    kept = torch.cat([_padded([document.kept for document in members], fill=False).flatten() for members in ordered])
    outputs = torch.empty(num_tokens if query_positions is None else len(query_positions), dtype=torch.long)
    outputs[tokens[kept]] = kept.nonzero()[:, 0]
    return Documents(tuple(bucket.to(device) for bucket in buckets), outputs.to(device))


def _inverse(places: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Return each pack position's index in `places`, int64 [num_tokens], or −1 for absent positions."""
    if places is None:
        return torch.arange(num_tokens)
    index = torch.full((num_tokens,), -1)
    index[places.cpu()] = torch.arange(len(places))
    return index


class _Document:
    """One document: its keys [S], its queries [q] without those in earlier documents, and the queries' positions in the
    document. If all tokens are queries, the kernel needs no mask."""

    def __init__(self, places, query_index, key_index, unclaimed):
        self.keys = key_index[places]
        self.positions = (unclaimed[places] & (query_index[places] >= 0)).nonzero()[:, 0]
        self.queries = query_index[places][self.positions]
        self.kept = torch.ones_like(self.queries, dtype=torch.bool)
        self.is_whole = len(self.queries) == len(self.keys)


def _bucket(documents: list[_Document]) -> Bucket:
    keys, queries, positions = (
        _padded([getattr(document, name) for document in documents]) for name in ("keys", "queries", "positions")
    )
    is_causal = documents[0].is_whole
    visible = None if is_causal else torch.arange(keys.shape[1]) <= positions[:, None, :, None]
    return Bucket(keys, queries, visible)


def _padded(rows: list[torch.Tensor], fill: int | None = None) -> torch.Tensor:
    """Stack the rows into [D, longest]. Shorter rows are padded with `fill`, by default their last element."""
    longest = max(map(len, rows))
    return torch.stack(
        [F.pad(row, (0, longest - len(row)), value=int(row[-1]) if fill is None else fill) for row in rows]
    )


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[index] with a deterministic gradient. Plain indexing sums repeated rows in any order."""
    return F.embedding(index, rows.flatten(1)).unflatten(-1, rows.shape[1:])


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return the attention output, [n, heads, v]. query is [n, heads, d], key [T, kv heads, d] and value [T, kv heads,
    v]. The number of heads is a multiple of kv heads."""
    value_dim, outputs = value.shape[-1], []
    # torch's fused kernels require equal channel counts; otherwise torch materializes all scores.
    value = F.pad(value, (0, max(0, query.shape[-1] - value_dim)))
    for bucket in documents.buckets:
        q, k, v = take(query, bucket.queries), take(key, bucket.keys), take(value, bucket.keys)
        attended = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=bucket.visible,
            is_causal=bucket.visible is None,
            scale=scale,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return take(outputs[0] if len(outputs) == 1 else torch.cat(outputs), documents.outputs)[..., :value_dim]
