"""A Packing with what a test does not care about filled in, and the documents of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from megarl.data.packing import Packing
from megarl.planning.token_cost import TokenCost

Prompts = Sequence[tuple[int, Sequence[int]]]
"""The tokens of each prompt and of each of its responses, in the order of the pack."""


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


def documents(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns document_tokens and boundaries of TokenBatch."""
    found, end = [], 0
    for num_prompt, responses in prompts:
        prompt, end = range(end, end + num_prompt), end + num_prompt
        for num_response in responses:
            found.append([*prompt, *range(end, end + num_response)])
            end += num_response
    return torch.tensor([*chain.from_iterable(found)]), torch.tensor([0, *map(len, found)]).cumsum(0).int()
