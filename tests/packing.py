"""A Packing with what a test does not care about filled in."""

from __future__ import annotations

from megarl.data.packing import Packing
from megarl.planning.token_cost import TokenCost


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
