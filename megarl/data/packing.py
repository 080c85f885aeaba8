"""Which samples share a microbatch, and which rank gets it. Pure arithmetic on lengths: the driver decides it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Microbatch = tuple[int, ...]
"""Indexes of the samples that are packed together; empty for a microbatch that only keeps ranks in step."""


def pack(lengths: Sequence[int], token_budget: int) -> list[Microbatch]:
    """Packs samples into as few microbatches as first-fit-decreasing finds; none exceeds the budget.

    A longest-first order also puts similar lengths together, which is what attention wants.
    Raises ValueError for a sample that alone exceeds the budget: a sample is never split.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > token_budget:
            raise ValueError(
                f"actor.tokens_per_microbatch={token_budget}: sample {index} alone has {length} tokens; "
                f"a sample is never split over microbatches, so raise it to at least {length}"
            )
        slot = next((i for i, free in enumerate(room) if free >= length), None)
        if slot is None:
            bins.append([])
            room.append(token_budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= length
    return [tuple(sorted(members)) for members in bins]


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Spreads items over ranks, the costliest first, each to the rank with the least so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        heapq.heappush(heap, (load + costs[index], rank))
    return [sorted(members) for members in ranks]


def schedule(lengths: Sequence[int], token_budget: int, num_ranks: int) -> list[list[Microbatch]]:
    """Microbatches per data-parallel rank, equally many on each: pipeline schedules need that of all ranks.

    Every rank packs its own share, and the shorter lists are filled up with empty microbatches.
    """
    shares = balance(lengths, num_ranks)
    packed = [
        [tuple(share[i] for i in microbatch) for microbatch in pack([lengths[i] for i in share], token_budget)]
        for share in shares
    ]
    most = max((len(microbatches) for microbatches in packed), default=0)
    return [microbatches + [()] * (most - len(microbatches)) for microbatches in packed]
