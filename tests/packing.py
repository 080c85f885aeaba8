"""A Packing with what a test does not care about filled in, and the documents of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost

Trees = Sequence[tuple[int, Sequence["int | tuple[int, Sequence]"]]]
"""The tokens of each prompt, and what goes on from it, in the order of the pack: the tokens of a response that ends, or
those of a turn and what goes on from it."""


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
    """Return document_tokens and boundaries of TokenBatch."""
    found: list[list[int]] = []
    end = 0

    def add(before: list[int], branch: int | tuple[int, Sequence]) -> None:
        nonlocal end
        length, onward = (branch, ()) if isinstance(branch, int) else branch
        here = [*before, *range(end, end + length)]
        end += length
        for following in onward:
            add(here, following)
        if not onward:
            found.append(here)

    for tree in trees:
        add([], tree)
    return torch.tensor([*chain.from_iterable(found)]), torch.tensor([0, *map(len, found)]).cumsum(0).int()
