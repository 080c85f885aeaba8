"""Computes causal self-attention over packed documents at the cost of the documents, in plain torch.

A mask over the whole pack would cost the square of the pack. Here documents of similar length are unpacked into one
padded batch, attended by torch's causal kernel, and packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

LENGTH_STEP = 16
"""The step of document lengths. Documents whose lengths round up to the same multiple share a batch: less than 16
padded positions each."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, D of them, the longest of S tokens, with at most Q queries each.

    keys      int64 [D, S]: where a document's keys and values are; a shorter one's last token stands again
    queries   int64 [D, Q]: where its queries are; where there are fewer, any stand again
    visible   bool [D, 1, Q, S]: which keys a query sees; None: Q = S, and each sees those up to its own
    """

    keys: torch.Tensor
    queries: torch.Tensor
    visible: torch.Tensor | None

    def to(self, device: torch.device) -> Bucket:
        visible = None if self.visible is None else self.visible.to(device)
        return Bucket(self.keys.to(device), self.queries.to(device), visible)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a pack.

    buckets   all documents, each in one bucket
    outputs   int64 [n]: where each query's output is among those of the buckets, flattened one after the other
    """

    buckets: tuple[Bucket, ...]
    outputs: torch.Tensor


def documents_of(
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    own: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
) -> Documents:
    """Return the documents of a pack, computed once a microbatch, for all layers.

    document_tokens, boundaries   as in TokenBatch
    own    int64 [n ≥ 1]: the places in the pack of the tokens that queries come from (None: all, in order)
    held   int64 [T]: the place in the pack of each token, in the order of keys and values; given with own

    A token that several documents share (a common prompt) has the same output in each of them, as it attends to
    nothing after it; it is a query of the first document only.
    """
    device = document_tokens.device
    num_tokens = int(document_tokens.max()) + 1
    documents = document_tokens.cpu().tensor_split(boundaries[1:-1].long().cpu())
    groups: dict[tuple[bool, int], list[_Document]] = {}
    unclaimed = torch.ones(num_tokens, dtype=torch.bool)
    query_index, key_index = (_inverse(places, num_tokens) for places in (own, held))
    for places in documents:
        document = _Document(places, query_index, key_index, unclaimed)
        unclaimed[places] = False
        if len(document.queries):
            groups.setdefault((document.is_whole, -(-len(places) // LENGTH_STEP)), []).append(document)
    ordered = [members for _, members in sorted(groups.items())]
    buckets = [_bucket(members) for members in ordered]
    tokens = torch.cat([bucket.queries.flatten() for bucket in buckets])
    kept = torch.cat([_padded([document.kept for document in members], fill=False).flatten() for members in ordered])
    outputs = torch.empty(num_tokens if own is None else len(own), dtype=torch.long)
    outputs[tokens[kept]] = kept.nonzero()[:, 0]
    return Documents(tuple(bucket.to(device) for bucket in buckets), outputs.to(device))


def _inverse(places: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Return int64 [num_tokens]: the index in `places` of each place in the pack, −1 where it is not among them."""
    if places is None:
        return torch.arange(num_tokens)
    index = torch.full((num_tokens,), -1)
    index[places.cpu()] = torch.arange(len(places))
    return index


class _Document:
    """A document: its keys [S], its queries [q] that no document before it has, and their positions in it. Where those
    are all, the kernel needs no mask."""

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
    """Return the rows as one [D, longest]; a shorter row is filled up by `fill`, or without it by its last element."""
    longest = max(map(len, rows))
    return torch.stack(
        [F.pad(row, (0, longest - len(row)), value=int(row[-1]) if fill is None else fill) for row in rows]
    )


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[index], whose gradient is the same in every run: that of indexing sums rows that stand more than
    once in the order in which threads happen to reach them."""
    return F.embedding(index, rows.flatten(1)).unflatten(-1, rows.shape[1:])


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return the attended values, [n, heads, v].

    query [n, heads, d], key [T, kv heads, d], value [T, kv heads, v], heads a multiple of kv heads.
    """
    value_dim, outputs = value.shape[-1], []
    # torch's kernels want as many channels of all three; where they differ, it stores the score of each pair of tokens.
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


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return [T, heads, v] by a softmax under one mask over the whole pack, in which a token sees those before it in
    its documents: the plain twin of `packed_attention`."""
    num_tokens, heads_per_kv_head = query.shape[0], query.shape[1] // key.shape[1]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for document in document_tokens.tensor_split(boundaries[1:-1].long()):
        visible[document[:, None], document[None]] |= torch.ones(len(document), len(document)).tril().bool()
    key, value = (x.repeat_interleave(heads_per_kv_head, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value)
