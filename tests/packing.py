"""A Packing with defaults for tests, and the documents of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost

Trees = Sequence[tuple[int, Sequence["int | tuple[int, Sequence]"]]]
"""The prompts of a pack in order, each as its number of tokens and its continuations. A continuation is a response's
number of tokens, or a turn's number of tokens with continuations of its own."""


def packing(pack_multiple: int = 1, shares_prompts: bool = True, **changes) -> Packing:
    fields = dict(
        token_budget=100,
        num_ranks=1,
        shares_prompts=shares_prompts,
        document_multiple=1,
        pack_multiple=pack_multiple,
        microbatch_multiple=1,
        cost=TokenCost(attended=0.0, scored=0.0),
    )
    return Packing(**(fields | changes))


def documents(trees: Trees) -> tuple[torch.Tensor, torch.Tensor]:
    """Return TokenBatch's document_tokens and boundaries."""
    tokens_by_document: list[list[int]] = []
    end = 0

    def add(prefix: list[int], branch: int | tuple[int, Sequence]) -> None:
        nonlocal end
        length, continuations = (branch, ()) if isinstance(branch, int) else branch
        document = [*prefix, *range(end, end + length)]
        end += length
        for continuation in continuations:
            add(document, continuation)
        if not continuations:
            tokens_by_document.append(document)

    for tree in trees:
        add([], tree)
    boundaries = torch.tensor([0, *map(len, tokens_by_document)]).cumsum(0).int()
    return torch.tensor([*chain.from_iterable(tokens_by_document)]), boundaries
