"""A plain reference for megarl.ops.packed_attention."""

from __future__ import annotations

import torch


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_tokens: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the attention output, [T, heads, v], computed with a softmax under a dense mask over the whole pack. Each
    token attends to itself and to the preceding tokens in its documents."""
    num_tokens, heads_per_kv_head = query.shape[0], query.shape[1] // key.shape[1]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for document in document_tokens.tensor_split(boundaries[1:-1].long()):
        visible[document[:, None], document[None]] |= torch.ones(len(document), len(document)).tril().bool()
    key, value = (x.repeat_interleave(heads_per_kv_head, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value)
