"""A plain reference for megarl.ops.packed_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.closeness import assert_matches


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


def assert_matches_plain(
    actual: torch.Tensor, inputs: Sequence[torch.Tensor | None], gradient: torch.Tensor, *others: Any
) -> None:
    """Compare an attention output and the gradients of its inputs with `plain_attention`.

    Args:
        inputs: query, key, value and sinks, which may be None.
        gradient: gradient of the output.
        others: document_tokens, boundaries, scale and window.
    """

    def results(output: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(output, [x for x in leaves if x is not None], gradient.to(output.dtype))
        # Errors are relative to the largest gradient of all inputs, because the gradient of a row's only key is 0.
        return {"output": output.detach(), "gradients": torch.cat([x.flatten() for x in found])}

    def plain() -> dict[str, torch.Tensor]:
        dtype = torch.get_default_dtype()
        leaves = [None if x is None else x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        return results(plain_attention(*leaves[:3], *others, leaves[3]), leaves)

    assert_matches(results(actual, inputs), plain, "attention")
