"""Causal self-attention over packed documents in plain torch, at the same cost as one call per document.

With a mask over the whole pack, the cost would grow with the square of the pack length. Instead, documents of similar
length are unpacked into a padded batch, processed by torch's causal kernel, and packed again. On GPU, documents of
different lengths that share no tokens are processed by FlashAttention's kernel for packed documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megarl.core.device import send

LENGTH_STEP = 16
"""Bucket width in tokens. Documents whose lengths round up to the same multiple share a batch, with fewer than 16
padding keys each."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """D documents of similar length: at most S tokens and at most Q queries each.

    Attributes:
        keys: (D, S). Documents with fewer tokens repeat their last token.
        queries: (D, Q). Documents with fewer queries repeat their last query.
        visible: bool [D, 1, Q, S], the keys that each query attends to. None means Q = S and a causal mask without a
            window.
    """

    keys: tuple[int, int]
    queries: tuple[int, int]
    visible: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents in a pack.

    Attributes:
        buckets: the documents, each in one bucket.
        keys, queries: int64, the indices of the buckets' keys and queries, flattened and concatenated.
        outputs: int64 [n], the index of each query in `queries`, without repetitions.
        are_separate: whether `keys` equals `queries`, because all documents are whole and share no tokens.
        are_in_order: whether, in addition, the indices are 0 to T − 1 in order, so that no rows are moved.
        boundaries: int32 [D + 1], the beginning of each document and the end of the last one; read only if the
            documents are separate.
        longest: number of tokens in the longest document.
        window: maximum number of tokens that a token attends to, including itself; None means no limit.
    """

    buckets: tuple[Bucket, ...]
    keys: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor
    are_separate: bool
    are_in_order: bool
    boundaries: torch.Tensor
    longest: int
    window: int | None = None


def documents_of(
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    device: torch.device | None = None,
    window: int | None = None,
) -> Documents:
    """Return the documents in a pack. Call it once per microbatch; all layers use the result.

    A token shared by several documents, such as a common prompt, has the same output in each document because attention
    is causal. It is a query only in the first of these documents.

    Args:
        document_tokens, boundaries: as in TokenBatch.
        query_positions: int64 [n ≥ 1], pack positions of the tokens that are queries on this rank; None means all
            tokens, in order.
        key_positions: int64 [T], the pack position of each row in keys and values. Required with `query_positions`.
        device: device of the attention's inputs; by default, that of `document_tokens`.
        window: as in Documents.
    """
    # Use NumPy, because torch's threads slow down operations on such short arrays on machines with many cores.
    device, tokens = device or document_tokens.device, document_tokens.cpu().numpy()
    num_tokens = int(tokens.max()) + 1
    documents = np.split(tokens, boundaries[1:-1].cpu().numpy())
    members_by_shape: dict[tuple[bool, int], list[_Document]] = {}
    unclaimed = np.ones(num_tokens, dtype=bool)
    query_index, key_index = (_inverse(places, num_tokens) for places in (query_positions, key_positions))
    for places in documents:
        document = _Document(places, query_index, key_index, unclaimed)
        unclaimed[places] = False
        if len(document.queries):
            members_by_shape.setdefault((document.is_whole, -(-len(places) // LENGTH_STEP)), []).append(document)
    ordered = [members for _, members in sorted(members_by_shape.items())]
    indices = [
        tuple(_padded([getattr(d, name) for d in members]) for name in ("keys", "queries")) for members in ordered
    ]
    keys, queries = (np.concatenate([index.ravel() for index in parts]) for parts in zip(*indices, strict=True))
    kept = np.concatenate([_padded([document.kept for document in members], fill=False).ravel() for members in ordered])
    outputs = np.empty(num_tokens if query_positions is None else len(query_positions), dtype=np.int64)
    outputs[queries[kept]] = kept.nonzero()[0]
    are_separate = len(tokens) == num_tokens == len(outputs) and np.array_equal(keys, queries)
    return Documents(
        tuple(_bucket(members, k, q, device, window) for members, (k, q) in zip(ordered, indices, strict=True)),
        send(torch.from_numpy(keys), device),
        send(torch.from_numpy(queries), device),
        send(torch.from_numpy(outputs), device),
        are_separate,
        are_in_order=are_separate and np.array_equal(queries, np.arange(num_tokens)),
        boundaries=send(boundaries, device) if boundaries.device != device else boundaries,
        longest=max(map(len, documents)),
        window=window,
    )


def _inverse(places: torch.Tensor | None, num_tokens: int) -> NDArray[np.int64]:
    """Return each pack position's index in `places`, [num_tokens], or −1 for absent positions."""
    if places is None:
        return np.arange(num_tokens)
    index = np.full(num_tokens, -1)
    index[places.cpu().numpy()] = np.arange(len(places))
    return index


class _Document:
    """One document: its keys [S]; its queries [q], excluding those that belong to an earlier document; and the queries'
    positions in the document. If all tokens are queries, the kernel needs no mask."""

    def __init__(
        self,
        places: NDArray[np.int64],
        query_index: NDArray[np.int64],
        key_index: NDArray[np.int64],
        unclaimed: NDArray[np.bool_],
    ):
        self.keys = key_index[places]
        self.positions = (unclaimed[places] & (query_index[places] >= 0)).nonzero()[0]
        self.queries = query_index[places][self.positions]
        self.kept = np.ones(len(self.queries), dtype=bool)
        self.is_whole = len(self.queries) == len(self.keys)


def _bucket(
    documents: list[_Document],
    keys: NDArray[np.int64],
    queries: NDArray[np.int64],
    device: torch.device,
    window: int | None,
) -> Bucket:
    visible = None
    if window is not None or not documents[0].is_whole:
        distances = _padded([document.positions for document in documents])[:, None, :, None] - np.arange(keys.shape[1])
        is_visible = distances >= 0 if window is None else (distances >= 0) & (distances < window)
        visible = send(torch.from_numpy(is_visible), device)
    return Bucket((keys.shape[0], keys.shape[1]), (queries.shape[0], queries.shape[1]), visible)


def _padded(rows: list[NDArray[Any]], fill: bool | None = None) -> NDArray[Any]:
    """Stack the rows into an array, [D, longest]. Shorter rows are padded with `fill`, or else with their last item."""
    stacked = np.empty((len(rows), max(map(len, rows))), rows[0].dtype)
    for target, row in zip(stacked, rows, strict=True):
        target[: len(row)], target[len(row) :] = row, row[-1] if fill is None else fill
    return stacked


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[index] with a deterministic gradient. The gradient of plain indexing sums repeated rows in a
    nondeterministic order."""
    return F.embedding(index, rows.flatten(1)).unflatten(-1, rows.shape[1:])


def _uses_flash_attention(query: torch.Tensor, documents: Documents, dropout: float) -> bool:
    """Return whether the kernel for packed documents is applicable and faster than padded batches. On H200, it reaches
    240 TFLOP/s for documents of mixed lengths, and batches 165. For documents of equal length, it reaches 216, and a
    single batch 332."""
    moves = documents.are_separate and not documents.are_in_order
    return moves and dropout == 0 and query.is_cuda and query.dtype is not torch.float32 and query.shape[-1] <= 256


def _split(rows: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Split the rows into consecutive batches with these shapes."""
    parts = [rows] if len(shapes) == 1 else rows.split([prod(shape) for shape in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


class _Take(torch.autograd.Function):
    """rows[index], where each row occurs at inverse[row] and all its other occurrences have a gradient of zero. On GPU,
    the gradient of `take` sorts the index, which takes several times as long."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], [inverse] = grad_outputs, ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


class _TakeOnce(torch.autograd.Function):
    """rows[index], where no row occurs more than once."""

    @staticmethod
    def forward(ctx, rows, index):
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], [index] = grad_outputs, ctx.saved_tensors
        zeros = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return zeros.index_copy_(0, index, gradient), None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output, [n, heads, v]. query is [n, heads, d], key [T, kv heads, d] and value [T, kv heads,
    v]. The number of heads is a multiple of kv heads. `sinks`, [heads], are logits that each query's softmax includes,
    without a value vector, as in gpt-oss."""
    value_dim = value.shape[-1]
    # Pad v: unless q, k and v have the same head dim, torch skips its fused kernels and materializes all scores.
    value = F.pad(value, (0, max(0, query.shape[-1] - value_dim)))
    grouped = query.shape[1] != key.shape[1]
    uses_flash_attention = sinks is None and _uses_flash_attention(query, documents, dropout)
    if documents.are_in_order or uses_flash_attention:
        # Copy v: kernels save their inputs for the backward pass, and a view would keep the whole projection alive.
        value = value.contiguous()
    if uses_flash_attention:
        from torch.nn.attention.varlen import varlen_attn  # a slow import: it imports torch's compiler

        bounds, longest = documents.boundaries, documents.longest
        before = -1 if documents.window is None else documents.window - 1
        attended: Any = varlen_attn(  # annotated as a tensor or a tuple
            query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(before, 0)
        )
        return attended[..., :value_dim]
    if not documents.are_in_order:
        # The repeated tokens that pad a document have no gradient: outputs of padding queries are not read, and other
        # queries do not attend to padding keys.
        query = _Take.apply(query, documents.queries, documents.outputs)
        if documents.are_separate:
            key, value = (_Take.apply(x, documents.keys, documents.outputs) for x in (key, value))
        else:
            key, value = take(key, documents.keys), take(value, documents.keys)
    buckets, outputs = documents.buckets, []
    queries = _split(query, [bucket.queries for bucket in buckets])
    keys, values = (_split(x, [bucket.keys for bucket in buckets]) for x in (key, value))
    for bucket, q, k, v in zip(buckets, queries, keys, values, strict=True):
        rows, visible = tuple(x.transpose(1, 2) for x in (q, k, v)), bucket.visible
        if sinks is not None:
            rows, visible = _with_sink(*rows, visible, sinks / scale)
        attended = F.scaled_dot_product_attention(
            *rows,
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
            dropout_p=dropout,
            enable_gqa=grouped,
        )
        outputs.append(attended[..., : value.shape[-1]].transpose(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (out if documents.are_in_order else _TakeOnce.apply(out, documents.outputs))[..., :value_dim]


def _with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Append a key whose product with a query of head h is sinks[h], and whose value is zero. query is [D, heads, Q,
    d], key and value [D, kv heads, S, d].

    The key is zero except in an additional channel, where it is 1 and the queries hold the sinks. Seven more channels
    keep their number a multiple of eight, which torch's fused kernels require.
    """
    num_channels = query.shape[-1]
    channel = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = torch.cat((query, channel, query.new_zeros(*query.shape[:3], 7)), -1)
    key, value = F.pad(key, (0, 8, 0, 1)), F.pad(value, (0, 8, 0, 1))
    key[..., -1, num_channels] = 1
    if visible is None:
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
    return (query, key, value), F.pad(visible, (0, 1), value=True)
