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
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output, [T, heads, v], computed with a softmax under a dense mask over the whole pack. Each
    token attends to itself and to the preceding tokens in its documents, up to `window` tokens in total. `sinks`,
    [heads], are further logits in each softmax, whose weights are dropped."""
    num_tokens, heads_per_kv_head = query.shape[0], query.shape[1] // key.shape[1]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for document in document_tokens.tensor_split(boundaries[1:-1].long()):
        within = torch.ones(len(document), len(document)).tril().bool()
        visible[document[:, None], document[None]] |= within if window is None else within.triu(1 - window)
    key, value = (x.repeat_interleave(heads_per_kv_head, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_tokens, 1)), -1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return torch.einsum("hij,jhd->ihd", weights, value)
